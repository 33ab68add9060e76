// What is predicted, as text, tables and bars. Every number comes with its text.

import { heading, html } from "lab/dom";

const NAMES = { gemmery: "gemmery", roofline: "roofline" };

function put(id, ...children) {
  document.getElementById(id).replaceChildren(...children.flat().filter((child) => child));
}

function bar(kind, share) {
  return html("span", { class: "track", "aria-hidden": "true" },
    html("span", { class: `bar ${kind}`, style: { width: `${100 * Math.max(share, 0.004)}%` } }));
}

function figure(id, label, text, note = "") {
  return html("div", { class: "figure" },
    html("dt", {}, label), html("dd", { id }, text), note && html("dd", { class: "note" }, note));
}

export function headline(answer) {
  const { times } = answer;
  const bars = ["gemmery", "cublas", "roofline"].filter((name) => times[name]).map((name) =>
    html("tr", { class: name },
      html("th", { scope: "row" }, NAMES[name] ?? answer.vendor),
      html("td", { class: "long" }, bar(name, times[name].share)),
      html("td", { id: `${name}-time`, class: "number" }, times[name].text),
      html("td", { id: `${name}-rate`, class: "number note" }, times[name].rate.text)));
  const nothing = html("p", { class: "lead" }, answer.choice.reasons[0]);
  const figures = html("dl", { class: "figures" },
    times.gemmery && figure("gemmery-headline", "gemmery", times.gemmery.text, times.bound),
    times.room && figure("room", "room under the roofline", times.room.text, `${times.reached.text} of it reached`),
    times.ratio && figure("ratio", `${answer.vendor} / gemmery`, times.ratio.text, `above 1, gemmery is faster; ${times.verdict}`));
  put("headline",
    html("div", { class: "heading" },
      html("h2", { id: "headline-title" }, answer.title), html("p", {}, answer.about)),
    times.mark && html("p", { class: "mark", id: "mark", role: "note" }, times.mark),
    times.recorded && html("p", { class: "lead", id: "recorded" }, times.recorded),
    times.gemmery ? figures : nothing,
    html("table", { class: "bars" },
      html("caption", { class: "hidden" }, "Predicted times and rates"),
      html("tbody", {}, bars)),
    times.calls && html("p", { class: "note", id: "calls" }, times.calls),
    times.basis && html("p", { class: "note", id: "basis" }, times.basis),
    answer.notes.map((note) => html("p", { class: "note remark" }, note)));
}

function costs(parts) {
  return html("table", { class: "bars parts" },
    html("caption", {}, "The parts of its time, which overlap"),
    html("tbody", {}, parts.map((part) =>
      html("tr", {},
        html("th", { scope: "row" }, part.text),
        html("td", {}, bar("gemmery", part.share)),
        html("td", { id: `part-${part.name}`, class: "number" }, part.seconds.text)))));
}

function candidates(choice) {
  const rows = choice.candidates.map((candidate, index) =>
    html("tr", {},
      html("th", { scope: "row", class: "code" }, candidate.config),
      html("td", { class: "number", id: `candidate-${index}` }, candidate.predicted ? candidate.predicted.text : "–"),
      html("td", { class: "number" }, candidate.measured ? candidate.measured.text : "–")));
  return html("details", {},
    html("summary", {}, choice.chosen_over),
    html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Candidates" },
      html("table", { class: "list" },
        html("thead", {}, html("tr", {},
          html("th", { scope: "col" }, "config"),
          html("th", { scope: "col", class: "number" }, "predicted"),
          html("th", { scope: "col", class: "number" }, "measured"))),
        html("tbody", {}, rows))));
}

export function config(answer) {
  const { choice } = answer;
  const title = heading("config", "The chosen kernel, and why");
  if (choice.config === null) return put("config", title, html("p", {}, choice.reasons[0]));
  return put("config",
    title,
    html("p", { class: "code lead", id: "chosen" }, choice.config),
    html("p", { class: "note" }, choice.note),
    html("ul", { class: "reasons" }, choice.reasons.map((reason) => html("li", {}, reason))),
    costs(choice.parts),
    html("dl", { class: "knobs" }, choice.knobs.map((knob) => html("div", {},
      html("dt", {}, knob.name), html("dd", { class: "value" }, knob.value), html("dd", { class: "note" }, knob.about)))),
    candidates(choice));
}

// A wave is as wide as it is long in time, and as high as it is full.
export function waves(answer) {
  const { waves: found } = answer;
  if (found === null) return put("waves", heading("waves", "Waves and tail"), html("p", {}, answer.missing));
  const runs = found.runs.map((run) => html("span", { style: { "flex-grow": run.length }, title: run.text },
    html("span", { style: { height: `${100 * run.filled}%`, "--waves": run.waves } })));
  return put("waves",
    heading("waves", "Waves and tail", found.where),
    html("div", { class: "waves", role: "img", "aria-label": found.text }, runs),
    html("p", { id: "waves-text" }, found.text),
    html("dl", { class: "figures small" },
      figure("waves-tiles", "tiles", found.tiles.text, found.grid),
      figure("waves-busy", "multiprocessors busy", found.busy.text, "of the launch, if time went by work alone"),
      figure("waves-inside", "of the tiles inside the matrix", found.inside.text, "the rest is outside the matrix")));
}

export function traffic(answer) {
  const { traffic: found } = answer;
  const title = heading("traffic", "Bytes of A and B, level by level", found ? found.where : "");
  if (found === null) return put("traffic", title, html("p", {}, answer.missing));
  return put("traffic", title,
    html("ol", { class: "levels" }, found.levels.map((level, index) => html("li", {},
      html("div", {}, html("span", {}, level.name), html("strong", { id: `level-${index}` }, level.bytes.text)),
      bar(level.kind, level.share),
      html("p", { class: "note" }, level.about)))),
    html("p", { class: "note" }, found.text));
}
