// Draws layers (or ranks) by steps, coloured by how far each value is from its usual.
const LABELS = () => Math.min(260, Math.max(150, window.innerWidth * 0.2));

function mix(from, to, share) {
  const parts = (text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
  const [a, b] = [parts(from), parts(to)];
  return a.map((x, i) => Math.round(x + (b[i] - x) * share));
}

// The colours of deviations from -clip to clip in tenths: blue below, orange above, nearly the paper's where it is usual.
function palette(clip) {
  const [low, calm, high] = [colour("low"), colour("calm"), colour("high")];
  return (tenths) => {
    const share = Math.min(1, Math.abs(tenths) / (10 * clip));
    return mix(calm, tenths < 0 ? low : high, share);
  };
}

function rowHeights(found, suspects, most) {
  const usual = Math.min(16, Math.max(2, Math.floor(most / Math.max(found.names.length, 1))));
  return found.names.map((name) => (suspects.has(plainName(name)) ? Math.max(usual, 15) : usual));
}

const plainName = (name) => name.replace(/ \(of \d+ layers\)$/, "");

function drawMap(canvas, found, suspects, most) {
  const heights = rowHeights(found, suspects, most), total = heights.reduce((a, b) => a + b, 0), left = LABELS();
  const [pen, width] = prepared(canvas, TOP + total + BOTTOM);
  const [first, last] = stepsShown();
  const codes = decoded(found.deviations, Int8Array), values = decoded(found.values, Float32Array);
  const rgb = palette(found.clip), wide = width - left - RIGHT;
  const toX = (step) => left + ((step - first) / (last - first)) * wide;
  const none = colour("none"), wrong = colour("wrong");
  let y = TOP, labelled = -20;
  const rows = [];
  for (let row = 0; row < found.names.length; row++) {
    const high = heights[row];
    for (let column = 0; column < found.columns; column++) {
      const at = row * found.columns + column, code = codes[at], value = values[at];
      const x = Math.max(toX(found.first + column * found.width), left);
      const right = Math.min(toX(found.first + (column + 1) * found.width), width - RIGHT);
      if (right <= x) continue;
      pen.fillStyle = Number.isNaN(value) ? none : !Number.isFinite(value) ? wrong : `rgb(${rgb(code === -128 ? 0 : code)})`;
      pen.fillRect(Math.floor(x), y, Math.ceil(right) - Math.floor(x), high > 3 ? high - 0.5 : high);
    }
    rows.push([y, y + high]);
    y += high;
  }
  pen.textAlign = "right"; pen.textBaseline = "middle";
  const middle = (row) => (rows[row][0] + rows[row][1]) / 2;
  const taken = [];
  found.names.forEach((name, row) => {
    if (!suspects.has(plainName(name))) return;
    pen.font = "bold 11px system-ui, sans-serif"; pen.fillStyle = colour("bad");
    pen.fillText(fitted(pen, `▸ ${plainName(name)}`, left - 6), left - 5, middle(row));
    taken.push(middle(row));
  });
  pen.font = "11px system-ui, sans-serif"; pen.fillStyle = colour("dim");
  found.names.forEach((name, row) => {
    const at = middle(row);
    if (suspects.has(plainName(name)) || at - labelled < 13 || taken.some((other) => Math.abs(other - at) < 13)) return;
    pen.fillText(fitted(pen, name, left - 6), left - 5, at);
    labelled = at;
  });
  pen.textBaseline = "top"; pen.textAlign = "center";
  for (const step of stepTicks(first, last, wide)) pen.fillText(String(step), toX(step), TOP + total + 5);
  flags(pen, toX, first, last, TOP, width);
  return (step, offset) => {
    const row = rows.findIndex(([top, end]) => offset >= top && offset < end);
    const column = Math.floor((step - found.first) / found.width);
    if (row < 0 || column < 0 || column >= found.columns) return "";
    const at = row * found.columns + column, code = codes[at];
    const away = code === -128 ? "" : `, ${code >= 127 ? "12.7 or more" : code <= -127 ? "-12.7 or less" : code / 10} deviations from usual`;
    const begins = found.first + column * found.width;
    const steps = found.width > 1 ? `steps ${begins} to ${begins + found.width - 1}` : `step ${begins}`;
    return `${found.names[row]}, ${steps}: ${shown(values[at])}${away}`;
  };
}

function fitted(pen, text, room) {
  let most = text.length;
  while (most > 4 && pen.measureText(ends(text, most)).width > room) most--;
  return ends(text, most);
}

function drawBar(canvas, found) {
  const [pen, width] = prepared(canvas, 34), rgb = palette(found.clip), bar = Math.min(width - 150, 320);
  for (let x = 0; x < bar; x++) {
    pen.fillStyle = `rgb(${rgb((2 * (x / bar) - 1) * 10 * found.clip)})`;
    pen.fillRect(x, 0, 1.5, 12);
  }
  pen.fillStyle = colour("dim"); pen.textBaseline = "top";
  [["left", 0, `−${found.clip}`], ["center", bar / 2, "usual"], ["right", bar, `+${found.clip}`]].forEach(([align, x, text]) => {
    pen.textAlign = align; pen.fillText(text, x, 15);
  });
  pen.textAlign = "left";
  pen.fillStyle = colour("wrong"); pen.fillRect(bar + 14, 0, 12, 12);
  pen.fillStyle = colour("dim"); pen.fillText("not finite", bar + 31, 1);
  pen.fillStyle = colour("none"); pen.fillRect(bar + 92, 0, 12, 12);
  pen.fillStyle = colour("dim"); pen.fillText("none", bar + 109, 1);
}
