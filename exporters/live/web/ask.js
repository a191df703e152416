// Asks the server, and makes elements: text is only ever set as text, so that no name can become markup.
const $ = (id) => document.getElementById(id);

function make(tag, settings = {}, ...inside) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(settings)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made[key] = value;
  }
  made.append(...inside.filter((item) => item !== null && item !== undefined));
  return made;
}

async function ask(question, query = {}) {
  const sent = new URLSearchParams();
  for (const [key, value] of Object.entries({ run: view.run, ...query })) {
    if (value !== "" && value !== null && value !== undefined) sent.set(key, value);
  }
  const answer = await fetch(`/api/${question}?${sent}`, { headers: { Accept: "application/json" } });
  const found = await answer.json();
  if (found.error) throw new Error(found.error);
  return found;
}

function trouble(text) {
  $("trouble").hidden = !text;
  $("trouble").textContent = text || "";
}

function shown(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  if (Number.isNaN(value)) return "no sample";
  if (!Number.isFinite(value)) return "not finite";
  const size = Math.abs(value);
  if (value === 0 || (size >= 0.001 && size < 1e6)) return String(Number(value.toPrecision(5)));
  return value.toExponential(2);
}

function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.max(0, Math.round(1000 * seconds))} ms`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const counted = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

// What the person looks at: the run, the rank (none: that of the worst incident), the range of steps (null: all), the chosen series, the map's table.
const view = { run: "", rank: "", first: null, last: null, log: false, chosen: [], table: "", state: null };
