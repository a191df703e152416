// Shows a run's state in words: verdict, tiles, incidents, ranks.
function showState(state) {
  const worst = state.incidents.find((incident) => incident.worst);
  $("pill").textContent = state.state;
  $("pill").className = `pill ${state.state.split(" ")[0]}`;
  $("where").textContent = [
    state.step >= 0 ? `step ${state.step}` : "no step",
    state.age === null || state.age === undefined ? "" : `seen ${span(state.age)} ago`,
    state.framework,
  ].filter(Boolean).join(", ");
  document.title = `${worst ? `${counted(state.count, "incident")}: ` : ""}${view.run && view.run !== "." ? view.run : "trainsentry"}`;
  const verdict = $("verdict");
  if (worst) {
    verdict.className = "bad";
    verdict.replaceChildren(
      make("h1", {}, worst.summary || "An incident without a sentence."),
      make("p", {}, make("span", { class: "culprit" }, `First suspect: ${worst.name ?? "–"}`),
        ` (${worst.quantity ?? "–"}, rank ${worst.rank ?? "–"}), from step ${worst.first_seen ?? worst.step ?? "–"}. `,
        state.count > 1 ? `The worst of ${counted(state.count, "incident")}.` : "The only incident."),
    );
  } else {
    const none = state.step < 0 ? "No step was recorded yet." : "No incident.";
    verdict.className = state.step < 0 ? "" : "good";
    verdict.replaceChildren(make("h1", {}, state.state === "unreadable" ? "This run cannot be shown." : none));
  }
  showTiles(state);
  showIncidents(state);
  showRanks(state);
  $("settings").replaceChildren(...(state.settings ?? []).map(([key, value]) =>
    make("tr", {}, make("td", { class: "text" }, key), make("td", { class: "text" }, value))));
  const more = (state.problem_count ?? 0) - (state.problems ?? []).length;
  $("problems").textContent = (state.problems ?? []).join(" · ") + (more > 0 ? ` · and ${counted(more, "more problem")}` : "");
}

function share(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
}

function showTiles(state) {
  const cost = state.cost ?? {}, lag = state.lag_steps;
  const tiles = [
    ["step", state.step >= 0 ? state.step : "none", false],
    ["incidents", state.count, state.count > 0],
    ["recorder's lag", lag === null || lag === undefined ? "–" : lag ? `${counted(lag, "step")}, ${span(state.lag_seconds)}` : "none", lag > 20],
    ["monitor's cost, recent", share(cost.recent_share), cost.recent_share > 0.05],
    ["cost in all", `${share(cost.share)}${cost.seconds_a_step ? `, ${(1000 * cost.seconds_a_step).toFixed(1)} ms a step` : ""}`, false],
    ["ranks", `${state.rank_count ?? 0}${state.world_size ? ` of ${state.world_size}` : ""}`, false],
    ["ranks in trouble", (state.ranks ?? []).filter((r) => r.trouble || r.silent).length, (state.ranks ?? []).some((r) => r.trouble || r.silent)],
  ];
  $("tiles").replaceChildren(...tiles.map(([name, value, warn]) =>
    make("div", { class: warn ? "warn" : "" }, make("dt", {}, name), make("dd", {}, String(value)))));
}

let incidentsShown = "";
function showIncidents(state) {
  const now = JSON.stringify(state.incidents);
  if (now === incidentsShown) return;  // an open one stays open
  const open = new Set([...document.querySelectorAll("#incidents details[open]")].map((d) => d.dataset.id));
  incidentsShown = now;
  const title = state.count > state.incidents.length ? `Incidents: the worst ${state.incidents.length} of ${state.count}` : `Incidents: ${state.count}`;
  $("incidents-title").textContent = title;
  $("incidents").replaceChildren(...state.incidents.map((incident) => {
    const from = incident.first_seen ?? incident.step, to = incident.last_seen ?? from;
    const item = make("details", { open: open.has(String(incident.id)) },
      make("summary", {}, make("span", { class: "head" }, `${incident.id ?? "–"}. step ${from ?? "–"}${to > from ? ` to ${to}` : ""} `),
        incident.worst ? make("span", { class: "badge" }, "worst") : null,
        make("span", { class: "dim" }, ` ${incident.severity ?? ""}, ${incident.kind ?? ""}`),
        make("div", {}, incident.summary ?? "")),
      make("div", { class: "more" },
        make("div", { class: "tools" },
          make("button", { type: "button", onclick: () => showSuspects(incident) }, "show its curves"),
          make("button", { type: "button", onclick: () => zoomTo(Math.max(from - 50, 0), to + 50) }, "zoom to its steps")),
        make("ol", {}, ...incident.suspects.map((suspect) => make("li", {},
          make("button", { type: "button", class: "link", onclick: () => showSuspects({ suspects: [suspect], statistic: suspect.statistic ?? incident.statistic }) },
            `${suspect.name}`), ` ${suspect.quantity}, rank ${suspect.rank}: ${suspect.evidence || suspect.kind || ""}`))),
        make("ul", {}, ...incident.actions.map((action) => make("li", {}, action)))));
    item.dataset.id = String(incident.id);
    return make("li", { class: incident.severity === "critical" ? "critical" : "" }, item);
  }));
  if (!state.incidents.length) $("incidents").replaceChildren(make("li", { class: "dim" }, "none"));
}

function showRanks(state) {
  const columns = ["rank", "state", "step", "seen", "lag", "cost", "anomalies", "overflows", "skipped", "trouble"];
  const texts = new Set(["state", "trouble"]);
  $("rank-head").replaceChildren(make("tr", {}, ...columns.map((c) => make("th", { class: texts.has(c) ? "text" : "" }, c))));
  $("rank-rows").replaceChildren(...(state.ranks ?? []).map((r) => {
    const cells = [r.rank, r.silent ? "silent" : r.state, r.step ?? "–", r.age === null ? "–" : `${span(r.age)} ago`,
      r.lag_steps === undefined ? "–" : counted(r.lag_steps, "step"), share(r.cost?.recent_share),
      r.anomalies ?? "–", r.overflow_steps ?? "–", r.skipped_steps ?? "–", r.trouble];
    return make("tr", { class: r.silent || r.trouble ? "warn" : "" },
      ...cells.map((cell, i) => make("td", { class: texts.has(columns[i]) ? "text" : "" }, String(cell))));
  }));
  const more = (state.rank_count ?? 0) - (state.ranks ?? []).length;
  $("more-ranks").textContent = more > 0 ? `and ${counted(more, "more rank")}` : "";
}
