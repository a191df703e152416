// Maps of layers or ranks by steps, as `map_svg` draws them: shows a part of the steps, reads the cell below the pointer.
const NEUTRAL = 125, NOT_KNOWN = 254, NOT_FINITE = 255;

const roundSteps = (first, last, most) => {
  const rough = Math.max((last - first) / most, 1), power = 10 ** Math.floor(Math.log10(rough));
  const pitch = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let at = Math.ceil(first / pitch) * pitch; at < last; at += pitch) found.push(at);
  return found;
};

// Lays a map out for the steps from `first` up to `last`; what stands at other steps is hidden.
function showSteps(svg, first, last) {
  const own = svg.dataset, begin = Number(own.first), end = Number(own.last), span = last - first;
  svg.shown = [first, last];
  for (const image of svg.querySelectorAll(".cells image")) {
    image.setAttribute("x", `${(100 * (begin - first)) / span}%`);
    image.setAttribute("width", `${(100 * (end - begin)) / span}%`);
  }
  const ticks = [...svg.querySelectorAll(".dim[data-step]")];
  if (ticks.length) {
    const line = ticks.find((tick) => tick.tagName === "line"), text = ticks.find((tick) => tick.tagName === "text");
    for (const tick of ticks) tick.remove();
    for (const step of roundSteps(first, last, Math.max(2, svg.clientWidth / 90))) {
      const [mark, number] = [line.cloneNode(), text.cloneNode()];
      number.textContent = step;
      for (const made of [mark, number]) { made.dataset.step = step; svg.append(made); }
    }
  }
  for (const item of svg.querySelectorAll("[data-step]")) {
    const share = (Number(item.dataset.step) + 0.5 - first) / span;
    for (const name of item.tagName === "line" ? ["x1", "x2"] : ["x"]) item.setAttribute(name, `${100 * share}%`);
    item.setAttribute("visibility", share >= 0 && share <= 1 ? "visible" : "hidden");
  }
}

// Returns what stands at a place of a map: the row's name, and a sentence; null beside the data.
function cellAt(svg, event) {
  const own = svg.dataset, box = svg.getBoundingClientRect(), [first, last] = svg.shown, rows = svg.rows;
  const step = Math.floor(first + ((event.clientX - box.left) / box.width) * (last - first));
  let y = event.clientY - box.top - Number(own.top), row = 0;
  while (row < rows.length && y >= rows[row][1]) y -= rows[row++][1];
  const width = Number(own.width), column = Math.floor((step - Number(own.first)) / width), columns = (Number(own.last) - Number(own.first)) / width;
  if (y < 0 || row >= rows.length || column < 0 || column >= columns) return null;
  const level = svg.levels[row * columns + column], away = ((level - NEUTRAL) / NEUTRAL) * Number(own.limit);
  const far = level === 2 * NEUTRAL ? "or more " : level === 0 ? "or less " : "";
  const what = level === NOT_FINITE ? "not finite" : level === NOT_KNOWN ? "not known yet" : `${away > 0 ? "+" : ""}${away.toFixed(1)} ${far}${own.unit}`;
  const from = Number(own.first) + column * width;
  return { name: rows[row][0], step, text: `${rows[row][0]}, ${width > 1 ? `steps ${from} to ${from + width - 1}` : `step ${from}`}: ${what}` };
}

// Makes a map answer the pointer: `read` gets the sentence of a cell, `zoomed` the steps that were dragged over (null: all),
// `chosen` the name of the row that was clicked.
function mountMap(svg, { read, zoomed, chosen = () => {} }) {
  const own = svg.dataset;
  const narrow = matchMedia("(max-width: 700px)"), place = () => {
    const left = Number(narrow.matches ? own.left : own.wideLeft);
    svg.style.marginLeft = `${left}px`;
    svg.style.width = `calc(100% - ${left + 16}px)`;
  };
  narrow.addEventListener("change", place);
  place();
  svg.rows = JSON.parse(own.rows);
  svg.levels = Uint8Array.from(atob(own.levels), (c) => c.charCodeAt(0));
  svg.shown = [Number(own.first), Number(own.last)];
  let began = null;
  const stepAt = (event) => {
    const box = svg.getBoundingClientRect(), share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    return Math.round(svg.shown[0] + share * (svg.shown[1] - svg.shown[0]));
  };
  svg.addEventListener("pointermove", (event) => { read.textContent = cellAt(svg, event)?.text ?? "\u00a0"; });
  svg.addEventListener("pointerdown", (event) => { began = [stepAt(event), event.clientX]; });
  svg.addEventListener("pointerup", (event) => {
    const ended = stepAt(event), cell = cellAt(svg, event);
    if (began && Math.abs(event.clientX - began[1]) > 8) zoomed(Math.min(began[0], ended), Math.max(began[0], ended));
    else if (began && cell) chosen(cell.name);
    began = null;
  });
  svg.addEventListener("pointerleave", () => { began = null; });
  svg.addEventListener("dblclick", () => zoomed(null, null));
}
