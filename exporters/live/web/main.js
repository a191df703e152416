// Keeps the page up to date, and does what the person asks.
const POLL = 2500, REDRAW = 8000;
let drawnAt = 0, drawnStep = -2, asked = 0;

const seriesKey = (s) => [s.rank, s.table, s.name, s.statistic, s.stage ?? ""].join("\n");
const range = () => ({ first: view.first, last: view.last });

async function choose(series, { top = false } = {}) {
  if (!view.chosen.some((other) => seriesKey(other) === seriesKey(series))) {
    if (top) view.chosen.unshift(series); else view.chosen.push(series);
    view.chosen = view.chosen.slice(0, 6);
  }
  remember();
  await drawCurves();
}

async function showSuspects(incident, { top = true } = {}) {
  for (const suspect of incident.suspects.slice(0, 2).reverse()) {
    const found = await ask("series", { rank: suspect.rank, words: `${suspect.quantity} ${suspect.name}` }).catch(() => null);
    const exact = found?.found.find((s) => s.name === suspect.name && (s.table === suspect.quantity || s.table === "scalars"));
    if (!exact) { if (top) trouble(`${suspect.name} (${suspect.quantity}) has no recorded series.`); continue; }
    const wanted = suspect.statistic || incident.statistic;
    const statistic = exact.statistics.includes(wanted) ? wanted : exact.statistics.includes("norm") ? "norm" : exact.statistics[0];
    await choose({ ...exact, rank: String(suspect.rank), statistic }, { top });
  }
}

function zoomTo(first, last) {
  [view.first, view.last] = [first, last];
  [$("first").value, $("last").value] = [first ?? "", last ?? ""];
  remember();
  drawAll();
}

async function drawCurves() {
  const turn = ++asked, root = $("curves");
  const shownNow = new Set(view.chosen.map(seriesKey));
  for (const old of [...root.children]) if (!shownNow.has(old.dataset.key)) old.remove();
  for (const [place, series] of view.chosen.entries()) {
    let figure = [...root.children].find((child) => child.dataset.key === seriesKey(series));
    if (!figure) figure = curveFigure(series);
    if (root.children[place] !== figure) root.insertBefore(figure, root.children[place] ?? null);
  }
  await Promise.all(view.chosen.map(async (series) => {
    const figure = [...root.children].find((child) => child.dataset.key === seriesKey(series));
    const note = figure?.querySelector(".note");
    try {
      const points = await ask("points", { ...series, statistics: null, ...range() });
      if (turn !== asked || !figure) return;
      figure.points = points;
      const inside = drawCurve(figure.querySelector("canvas"), points), last = inside.at(-1);
      note.textContent = [last ? `${shown(last[1])} at step ${last[0]}` : "no value at these steps",
        points.whole ? "" : points.bucket ? `lowest and highest of every ${points.bucket} values; zoom in for all` : `a sample of ${points.recorded} values; zoom in for all`].filter(Boolean).join("; ");
    } catch (error) { if (note) note.textContent = error.message; }
  }));
  drawRankMaps();
}

function curveFigure(series) {
  const canvas = make("canvas", { role: "img" }), note = make("span", { class: "note dim" }, "reading …");
  const statistic = make("select", { ariaLabel: "statistic", onchange: (event) => {
    Object.assign(series, { statistic: event.target.value });
    figure.dataset.key = seriesKey(series);
    remember(); drawCurves();
  } }, ...series.statistics.map((s) => make("option", { selected: s === series.statistic }, s)));
  const name = `${series.name}${series.table === "scalars" ? "" : `, ${series.table}`}, rank ${series.rank}${series.stage ? `, chunk ${series.stage}` : ""}`;
  canvas.ariaLabel = `${name} over steps`;
  const figure = make("figure", { class: "curve" },
    make("figcaption", {}, make("b", {}, name), series.statistics.length > 1 ? statistic : null, note,
      make("button", { type: "button", ariaLabel: `remove ${name}`, onclick: () => {
        view.chosen = view.chosen.filter((other) => seriesKey(other) !== seriesKey(series));
        remember(); drawCurves();
      } }, "×")), canvas);
  figure.dataset.key = seriesKey(series);
  const stepAt = zooms(canvas);
  canvas.addEventListener("pointermove", (event) => {
    const step = stepAt(event), points = figure.points;
    if (!points?.steps.length) return;
    const near = points.steps.reduce((best, s, i) => (Math.abs(s - step) < Math.abs(points.steps[best] - step) ? i : best), 0);
    note.textContent = `${shown(points.values[near])} at step ${points.steps[near]}`;
  });
  return figure;
}

// The maps of the quantities that the incidents speak of, or of the one that the person chose.
async function drawMaps() {
  const tables = (await ask("series", { rank: view.rank }).catch(() => ({ tables: [] }))).tables ?? [];
  const incidents = [...(view.state?.incidents ?? [])].sort((a, b) => Number(b.worst) - Number(a.worst));
  const spoken = [...new Set(incidents.map((i) => i.quantity))].filter((t) => tables.includes(t)).slice(0, 3);
  const usual = spoken.length ? spoken : [tables.includes("gradient") ? "gradient" : tables[0]].filter(Boolean);
  if (!tables.includes(view.table)) view.table = "";
  $("table").replaceChildren(make("option", { value: "" }, spoken.length ? "those of the incidents" : `the usual: ${usual[0] ?? "none"}`),
    ...tables.map((t) => make("option", { selected: t === view.table }, t)));
  const wanted = view.table ? [view.table] : usual, root = $("maps");
  for (const old of [...root.children]) if (!wanted.includes(old.dataset.table)) old.remove();
  for (const table of wanted) if (![...root.children].some((c) => c.dataset.table === table)) root.append(layersFigure(table));
  $("map-part").hidden = !wanted.length;
  await Promise.all([...root.children].map(async (figure) => {
    try {
      const found = await ask("map", { rank: view.rank, table: figure.dataset.table, ...range() });
      const few = found.layers > found.rows ? `${found.layers} layers, neighbours in one row` : counted(found.layers, "layer");
      figure.show(found, noteOf(found, `rank ${view.rank}; ${few}`));
    } catch (error) { figure.fail(error.message); }
  }));
}

// A figure of a map that the server has drawn; `chosen` gets the name of a row that is clicked.
function mapFigure(title, chosen) {
  const read = make("p", { class: "dim read" }, "\u00a0"), note = make("span", { class: "note dim" }, "reading …"), place = make("div");
  const figure = make("figure", { class: "map" }, make("figcaption", {}, make("b", {}, title), note), place, read);
  figure.show = (found, text) => {
    note.textContent = text;
    if (figure.found?.svg !== found.svg) {
      const drawn = document.importNode(new DOMParser().parseFromString(found.svg, "image/svg+xml").documentElement, true);
      mountMap(drawn, { read, zoomed: zoomTo, chosen });
      place.replaceChildren(drawn);
    }
    figure.found = found;
    figure.redraw();
  };
  figure.redraw = () => { const [first, last] = stepsShown(), drawn = place.firstChild; if (drawn) showSteps(drawn, first, last + 1); };
  figure.fail = (text) => { note.textContent = text; };
  return figure;
}

function layersFigure(table) {
  const figure = mapFigure(table, async (name) => {
    const found = await ask("series", { rank: view.rank, words: `${table} ${name}` }).catch(() => null);
    const exact = found?.found.find((s) => s.name === name && s.table === table);
    if (exact) await choose({ ...exact, rank: view.rank, statistic: exact.statistics.includes("norm") ? "norm" : exact.statistics[0] }, { top: true });
  });
  figure.dataset.table = table;
  return figure;
}

function noteOf(found, counts) {
  return [counts, found.width > 1 ? `${found.width} steps a column, the furthest value` : "",
    found.whole ? "" : found.bucket ? `from the extremes of every ${found.bucket} samples; zoom in for all` : "a sample of the steps and those of the incidents; zoom in for all"].filter(Boolean).join("; ");
}

// Ranks by steps: the loss, the time of a step, and the series of the worst suspect or the one that the person chose.
function rankSeries() {
  const worst = (view.state?.incidents ?? []).find((i) => i.worst)?.suspects[0];
  const own = view.chosen.find((s) => s.table !== "scalars" && (!worst || s.name === worst.name)) ?? view.chosen[0];
  const scalars = ["loss", "step_seconds"].map((name) => ({ table: "scalars", name, statistic: "value" }));
  return [...scalars, own].filter((s, i, all) => s && all.findIndex((o) => o.table === s.table && o.name === s.name) === i);
}

async function drawRankMaps() {
  const many = (view.state?.rank_count ?? 0) > 1, root = $("rank-maps");
  $("rank-map-part").hidden = !many;
  const wanted = many ? rankSeries() : [], keys = wanted.map((s) => [s.table, s.name, s.statistic].join("\n"));
  for (const old of [...root.children]) if (!keys.includes(old.dataset.key)) old.remove();
  await Promise.all(wanted.map(async (series, place) => {
    let figure = [...root.children].find((child) => child.dataset.key === keys[place]);
    if (!figure) {
      figure = mapFigure(series.table === "scalars" ? series.name : `${series.name}, ${series.table}, ${series.statistic}`);
      figure.dataset.key = keys[place];
      root.append(figure);
    }
    try {
      const found = await ask("ranks", { table: series.table, name: series.name, statistic: series.statistic, ...range() });
      figure.hidden = !found.rows;
      figure.show(found, noteOf(found, found.rank_count > found.rows ? `${found.rows} of ${counted(found.rank_count, "rank")}` : counted(found.rows, "rank")));
    } catch (error) { figure.fail(error.message); }
  }));
}

function drawAll() {
  [drawnAt, drawnStep] = [Date.now(), view.state?.step ?? -1];
  return Promise.all([drawCurves(), drawMaps(), drawModules()]);
}

function redraw() {
  for (const figure of $("curves").children) if (figure.points) drawCurve(figure.querySelector("canvas"), figure.points);
  for (const figure of [...$("maps").children, ...$("rank-maps").children]) figure.redraw();
}

let searched = 0;
async function search() {
  const turn = ++searched, box = $("matches");
  try {
    const found = await ask("series", { rank: view.rank, words: $("search").value });
    if (turn !== searched) return;
    const rows = found.found.map((s) => make("li", { class: "choice", tabIndex: 0, onclick: () => take(s), onkeydown: (e) => { if (e.key === "Enter") take(s); } },
      `${s.name}${s.stage ? ` (chunk ${s.stage})` : ""} `, make("span", { class: "dim" }, s.table)));
    const rest = found.count - found.found.length;
    rows.push(make("li", { class: "dim" }, rest > 0 ? `and ${rest} more: add a word` : `${found.count} of ${counted(found.of, "series").replace("seriess", "series")}`));
    box.replaceChildren(...rows);
  } catch (error) { box.replaceChildren(make("li", { class: "dim" }, error.message)); }
  box.hidden = false;
}

function take(series) {
  const statistic = series.statistics.includes("norm") ? "norm" : series.statistics[0];
  $("matches").hidden = true;
  choose({ ...series, rank: view.rank, statistic }, { top: true });
}

function remember() {
  const kept = { run: view.run, rank: view.rank, first: view.first, last: view.last, log: view.log, chosen: view.chosen, table: view.table };
  history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(kept))}`);
}

function recall() {
  try {
    const kept = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    const number = (x) => (Number.isSafeInteger(x) && x >= 0 ? x : null);
    const chosen = (Array.isArray(kept.chosen) ? kept.chosen : []).filter((s) => Array.isArray(s?.statistics) && s.statistics.every((t) => typeof t === "string"));
    Object.assign(view, { run: String(kept.run ?? ""), rank: String(kept.rank ?? ""), first: number(kept.first), last: number(kept.last), log: Boolean(kept.log), chosen, table: String(kept.table ?? "") });
  } catch { /* no link to a view */ }
}

async function openRun() {
  const found = await ask("runs", { run: "" });
  const names = found.runs.map((r) => r.name);
  if (!names.includes(view.run)) view.run = names[0] ?? "";
  $("run-label").hidden = names.length < 2;
  $("run-name").textContent = names.length < 2 ? found.folder : "";
  $("run").replaceChildren(...found.runs.map((r) => make("option", { value: r.name, selected: r.name === view.run }, `${r.has_incidents ? "● " : ""}${r.name}`)));
  if (!names.length) throw new Error(`${found.folder}: no run yet; the page shows it as soon as there is one`);
}

async function firstLook() {
  const ranks = view.state.tables ?? [];
  const worst = view.state.incidents.find((i) => i.worst);
  if (!ranks.includes(view.rank)) view.rank = ranks.includes(String(worst?.rank)) ? String(worst.rank) : ranks[0] ?? "0";
  $("rank").replaceChildren(...ranks.map((r) => make("option", { selected: r === view.rank }, r)));
  if (!view.chosen.length) {
    const found = await ask("series", { rank: view.rank, words: "scalars loss" });
    const loss = found.found.find((s) => s.name === "loss") ?? found.found[0];
    if (loss) view.chosen = [{ ...loss, rank: view.rank, statistic: "value" }];
    const suspects = new Map();  // the worst incidents' first suspects, each once, in the order of their steps
    for (const i of [...view.state.incidents].sort((a, b) => (b.worst - a.worst) || ((b.score ?? 0) - (a.score ?? 0)))) {
      const first = i.suspects[0];
      if (first && suspects.size < 3 && !suspects.has(`${first.quantity} ${first.name}`)) suspects.set(`${first.quantity} ${first.name}`, i);
    }
    for (const i of [...suspects.values()].sort((a, b) => a.id - b.id)) await showSuspects({ ...i, suspects: i.suspects.slice(0, 1) }, { top: false });
  }
  view.looked = Boolean(view.chosen.length);
}

async function poll() {
  try {
    if (!document.hidden || !view.state) {
      if (!view.run || view.state === null) await openRun();
      view.state = await ask("state");
      trouble("");
      showState(view.state);
      if (!view.looked) await firstLook();
      const due = view.state.step !== drawnStep || view.fresh;
      if (due && (drawnStep < 0 || Date.now() - drawnAt > REDRAW || view.fresh)) { view.fresh = false; await drawAll(); }
      document.body.dataset.drawn = "yes";
    }
  } catch (error) {
    trouble(error instanceof TypeError ? "The server does not answer; the page goes on asking." : error.message);
  }
  setTimeout(poll, POLL);
}

$("run").addEventListener("change", (event) => {
  Object.assign(view, { run: event.target.value, rank: "", first: null, last: null, chosen: [], table: "", looked: false, fresh: true });
  drawnStep = -2;
  $("maps").replaceChildren();
  modulesShown = "";
  zoomTo(null, null);
});
$("rank").addEventListener("change", (event) => {
  view.rank = event.target.value;
  view.chosen = view.chosen.map((s) => ({ ...s, rank: view.rank }));
  remember(); drawAll();
});
$("table").addEventListener("change", (event) => { view.table = event.target.value; remember(); drawMaps(); });
$("log").addEventListener("change", (event) => { view.log = event.target.checked; remember(); redraw(); });
$("all").addEventListener("click", () => zoomTo(null, null));
for (const id of ["first", "last"]) $(id).addEventListener("change", () => {
  const [first, last] = ["first", "last"].map((key) => (/^\d{1,15}$/.test($(key).value.trim()) ? Number($(key).value) : null));
  zoomTo(first, last !== null && first !== null && last < first ? null : last);
});
$("search").addEventListener("input", search);
$("search").addEventListener("focus", search);
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Escape") $("matches").hidden = true;
  if (event.key === "Enter") $("matches").querySelector(".choice")?.click();
});
document.addEventListener("pointerdown", (event) => { if (!$("search-box").contains(event.target)) $("matches").hidden = true; });
window.addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
recall();
[$("first").value, $("last").value, $("log").checked] = [view.first ?? "", view.last ?? "", view.log];
poll();
