// Draws one series over steps; every figure of the page has the same range of steps.
const LEFT = 64, RIGHT = 10, TOP = 18, BOTTOM = 20;

function prepared(canvas, height) {
  const width = canvas.clientWidth, dense = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * dense);
  canvas.height = Math.round(height * dense);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(dense, dense);
  pen.font = "11px system-ui, sans-serif";
  return [pen, width];
}

function stepsShown() {
  const last = view.last ?? Math.max(view.state?.step ?? 0, 1);
  const first = view.first ?? 0;
  return [first, Math.max(last, first + 1)];
}

// Incidents stand as numbered flags in a strip above the data; those that would overlap share a flag.
function flags(pen, toX, first, last, top, width) {
  let free = -1;
  pen.textBaseline = "middle";
  for (const incident of view.state?.incidents ?? []) {
    const step = incident.first_seen ?? incident.step;
    if (step === undefined || step < first || step > last) continue;
    const x = toX(step), text = incident.worst ? `▼${incident.id} worst` : `▼${incident.id}`;
    pen.fillStyle = colour(incident.worst ? "bad" : "mark");
    pen.fillRect(x - 0.75, top - 4, 1.5, 5);
    const wide = pen.measureText(text).width, begins = Math.min(x - 4, width - RIGHT - wide);
    if (begins < free) continue;
    pen.font = incident.worst ? "bold 11px system-ui, sans-serif" : "11px system-ui, sans-serif";
    pen.textAlign = "left";
    pen.fillText(text, begins, top - 10);
    free = begins + wide + 6;
  }
  pen.font = "11px system-ui, sans-serif";
}

function drawCurve(canvas, points) {
  const height = 170, [pen, width] = prepared(canvas, height);
  const [first, last] = stepsShown();
  const inside = points.values.map((v, i) => [points.steps[i], v]).filter(([s]) => s >= first && s <= last);
  const good = inside.filter(([, v]) => typeof v === "number" && (!view.log || v > 0));
  let low = Math.min(...good.map(([, v]) => v)), high = Math.max(...good.map(([, v]) => v));
  if (!good.length) [low, high] = view.log ? [0.1, 1] : [0, 1];
  const scale = view.log ? Math.log10 : (v) => v;
  let [from, to] = [scale(low), scale(high)];
  if (to - from < 1e-12 * Math.max(Math.abs(to), 1e-300)) [from, to] = [from - (Math.abs(from) * 0.05 || 0.5), to + (Math.abs(to) * 0.05 || 0.5)];
  [from, to] = [from - 0.04 * (to - from), to + 0.04 * (to - from)];
  const toX = (s) => LEFT + ((s - first) / (last - first)) * (width - LEFT - RIGHT);
  const toY = (v) => TOP + (1 - (scale(v) - from) / (to - from)) * (height - TOP - BOTTOM);
  pen.lineWidth = 1;
  pen.textBaseline = "middle";
  for (let n = 0; n <= 3; n++) {
    const at = from + ((to - from) * (n + 0.2)) / 3.4, y = TOP + (1 - (at - from) / (to - from)) * (height - TOP - BOTTOM);
    pen.strokeStyle = colour("line");
    pen.beginPath(); pen.moveTo(LEFT, y); pen.lineTo(width - RIGHT, y); pen.stroke();
    pen.fillStyle = colour("dim"); pen.textAlign = "right";
    pen.fillText(tick(view.log ? 10 ** at : at), LEFT - 5, y);
  }
  pen.textBaseline = "top"; pen.textAlign = "center";
  for (const step of roundSteps(first, last + 1, Math.max(2, width / 110))) pen.fillText(String(step), toX(step), height - BOTTOM + 5);
  for (const incident of view.state?.incidents ?? []) {
    const step = incident.first_seen ?? incident.step;
    if (step < first || step > last) continue;
    pen.strokeStyle = colour(incident.worst ? "bad" : "mark"); pen.setLineDash([2, 4]);
    pen.beginPath(); pen.moveTo(toX(step), TOP); pen.lineTo(toX(step), height - BOTTOM); pen.stroke();
    pen.setLineDash([]);
  }
  pen.strokeStyle = colour("curve"); pen.fillStyle = colour("curve"); pen.lineWidth = 1.6; pen.lineJoin = "round";
  pen.beginPath();
  good.forEach(([s, v], i) => (i ? pen.lineTo(toX(s), toY(v)) : pen.moveTo(toX(s), toY(v))));
  pen.stroke();
  if (good.length < 80) for (const [s, v] of good) { pen.beginPath(); pen.arc(toX(s), toY(v), 2, 0, 7); pen.fill(); }
  pen.fillStyle = colour("wrong");
  for (const [s, v] of inside) if (typeof v !== "number") pen.fillRect(toX(s) - 1, TOP, 2, height - TOP - BOTTOM);
  flags(pen, toX, first, last, TOP, width);
  return inside;
}

function tick(value) {
  const size = Math.abs(value);
  if (value === 0 || (size >= 0.01 && size < 100000)) return String(Number(value.toPrecision(3)));
  return value.toExponential(1);
}

// Drag over a figure to zoom.
function zooms(canvas) {
  let began = null, band = null;
  const stepAt = (event) => {
    const [first, last] = stepsShown(), box = canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    return Math.round(first + Math.min(Math.max(share, 0), 1) * (last - first));
  };
  canvas.addEventListener("pointerdown", (event) => { began = stepAt(event); band = event.clientX; });
  canvas.addEventListener("pointerup", (event) => {
    const ended = stepAt(event);
    if (began !== null && Math.abs(event.clientX - band) > 8) zoomTo(Math.min(began, ended), Math.max(began, ended));
    began = null;
  });
  canvas.addEventListener("pointerleave", () => { began = null; });
  canvas.addEventListener("dblclick", () => zoomTo(null, null));
  return stepAt;
}
