// The page: a product in the controls and the address, its answer in the sections.

import { Address } from "lab/address";
import { Controls } from "lab/controls";
import { html } from "lab/dom";
import { Film } from "lab/order";
import { config, headline, traffic, waves } from "lab/results";
import { Roofline } from "lab/roofline";
import { Refused, source } from "lab/source";
import { theme } from "lab/theme";

// While a slider moves, the server is asked once in so many milliseconds.
const WAIT = 60;

const place = (id) => document.getElementById(id);
const answers = source();
const options = await answers.options();
const film = new Film(place("order"));
const roofline = new Roofline(place("roofline"));
const address = new Address(Object.keys(options.defaults), answers.fixed);
const texts = (query) => Object.fromEntries(Object.entries(query).map(([name, value]) => [name, String(value)]));
const current = () => ({ ...texts(options.defaults), ...address.read() });

const controls = new Controls(place("controls"), options, current(), (query, done) => {
  misread.clear();
  address.write(query, done);
  ask(query, done);
});
// What the address named that there is not, by field; the default stands in its place until something is chosen.
const misread = new Map();

let asked = null, waiting = null, wanted = null;

// Of several changes within the wait, the last is asked about.
function ask(query, at_once) {
  wanted = query;
  place("results").setAttribute("aria-busy", "true");
  if (at_once) clearTimeout(waiting);
  else if (waiting !== null) return;
  waiting = setTimeout(() => {
    waiting = null;
    answer(wanted);
  }, at_once ? 0 : WAIT);
}

async function answer(query) {
  // What was asked before is of no interest any more.
  asked?.abort();
  asked = new AbortController();
  const { signal } = asked;
  try {
    const found = await answers.answer(query, signal);
    if (!signal.aborted) show(found);
  } catch (error) {
    if (!signal.aborted && !fallBack(error)) fail(error);
  }
  if (!signal.aborted && waiting === null) place("results").setAttribute("aria-busy", "false");
}

// Answer with the default of a choice that the address names and the page has not; false if that is not what is wrong.
function fallBack(error) {
  if (!(error instanceof Refused) || misread.has(error.field) || !controls.isBlank(error.field)) return false;
  misread.set(error.field, `${error.message}; the default is shown`);
  controls.show({ ...controls.query, [error.field]: texts(options.defaults)[error.field] });
  ask(controls.query, true);
  return true;
}

function show(found) {
  place("failure").hidden = true;
  place("results").classList.remove("empty", "stale");
  controls.accept();
  // A GPU may have been named by a part of its name.
  if (waiting === null) {
    controls.show(texts(found.query));
    address.write(texts(found.query), false);
  }
  for (const [field, message] of misread) controls.note(field, message);
  for (const draw of [headline, config, waves, traffic]) draw(found);
  for (const drawing of [roofline, film]) drawing.show(found);
  place("summary").replaceChildren(
    ...found.summary.map(({ name, text }) => html("span", {}, `${name} `, html("strong", {}, text), " ")));
  document.title = `${found.title} – gemmery lab`;
}

function fail(error) {
  const known = error instanceof Refused && controls.refuse(error.field, error.message);
  place("results").classList.add("stale");
  // Where there is no answer yet that could stay, the message stands in its place too.
  place("failure").hidden = known && !place("results").classList.contains("empty");
  place("failure").textContent = error instanceof TypeError
    ? "The server does not answer. Is gemmery lab still running?" : error.message;
  place("summary").replaceChildren(html("span", {}, error.message));
}

addEventListener("popstate", () => {
  controls.show(current());
  ask(current(), true);
});

place("share").addEventListener("click", async () => {
  const button = place("share");
  address.write(controls.query, false);
  // Browsers keep the clipboard from pages that come over the network without encryption.
  if (!navigator.clipboard) return void prompt("The link to this product", location.href);
  await navigator.clipboard.writeText(location.href);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy link"), 1500);
});

theme(place("theme"), () => film.draw());
await answer(current());
