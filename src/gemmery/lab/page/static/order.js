// The order of tiles as a film: two grids side by side, wave after wave, with the rows of A and columns of B in use.

import { colour, heading, html } from "lab/dom";

const STRIP = 7, GAP = 5, TALLEST = 300;
// A film takes this long, whatever its number of tiles, and a wave not less than this; in milliseconds.
const FILM = 9000, WAVE = 350, PAUSE = 700;

const still = matchMedia("(prefers-reduced-motion: reduce)");

function mix(from, to, part) {
  return `rgb(${from.map((value, i) => Math.round(value + (to[i] - value) * part)).join(" ")})`;
}

class Grid {
  constructor(found, order) {
    Object.assign(this, { found, order });
    this.canvas = html("canvas", { role: "img", "aria-label": `Tiles visited ${order.text}` });
    this.caption = html("p", { class: "wave-text" });
  }

  draw(seen, colours) {
    const { rows, columns, programs, tiles } = this.found;
    const { canvas } = this;
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
    const wide = width - STRIP - GAP, cell = wide / columns;
    const high = Math.min(Math.max(cell * rows, 24), TALLEST);
    const tall = high / rows;
    canvas.style.height = `${high + STRIP + GAP}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round((high + STRIP + GAP) * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const line = Math.min(cell, tall) > 5 ? 1 : 0;
    // On whole pixels, so that neighbours neither overlap nor leave stripes.
    const snap = (at) => Math.round(at * ratio) / ratio;
    const span = (index, size, gap) => {
      const from = snap(STRIP + GAP + index * size), to = snap(STRIP + GAP + (index + 1) * size);
      return [from, Math.max(to - from - gap, 1 / ratio)];
    };
    pen.fillStyle = mix(colours.empty, colours.empty, 0);
    pen.fillRect(STRIP + GAP, STRIP + GAP, wide, high);
    pen.fillRect(STRIP + GAP, 0, wide, STRIP);
    pen.fillRect(0, STRIP + GAP, STRIP, high);
    const first = Math.floor(Math.max(seen - 1, 0) / programs) * programs;
    for (let time = 0; time < seen; time++) {
      const tile = this.order.visits[time], row = Math.floor(tile / columns), column = tile % columns;
      const now = time >= first;
      pen.fillStyle = now ? mix(colours.now, colours.now, 0) : mix(colours.early, colours.late, time / tiles);
      const [left, across] = span(column, cell, line), [top, down] = span(row, tall, line);
      pen.fillRect(left, top, across, down);
      if (now) {
        pen.fillRect(left, 0, across, STRIP);
        pen.fillRect(0, top, STRIP, down);
      }
    }
    this.caption.textContent = this.order.waves[first / programs];
  }
}

export class Film {
  constructor(section) {
    this.section = section;
    this.seen = 0;
    this.playing = null;
    this.resized = new ResizeObserver(() => this.draw());
  }

  show(answer) {
    this.stop();
    this.resized.disconnect();
    this.found = answer.order;
    const title = heading("order", "The order of tiles", this.found ? this.found.where : "");
    if (this.found === null) {
      this.section.replaceChildren(title, html("p", {}, answer.missing));
      return;
    }
    this.grids = this.found.orders.map((order) => new Grid(this.found, order));
    this.section.replaceChildren(
      title,
      html("p", { id: "order-text" }, this.found.text),
      this.#buttons(),
      html("div", { class: "grids" }, this.grids.map((grid, index) => html("figure", {},
        html("figcaption", {}, html("strong", {}, grid.order.text),
          html("span", { id: `hits-${index}`, class: "note" }, grid.order.hits)),
        grid.canvas, grid.caption))),
      html("p", { class: "note legend-line" },
        html("span", { class: "swatch now" }), "computed now, with rows of A on the left and columns of B above",
        html("span", { class: "swatch early" }), "first", html("span", { class: "swatch late" }), "last"));
    for (const grid of this.grids) this.resized.observe(grid.canvas);
    this.go(Math.min(this.found.programs, this.found.tiles));
  }

  #buttons() {
    const { tiles } = this.found;
    this.button = html("button", { type: "button", id: "play", onclick: () => this.playing === null ? this.play() : this.stop() }, "Play");
    this.scrubber = html("input", {
      type: "range", id: "time", min: 1, max: tiles, step: 1, "aria-label": "Tiles visited",
      oninput: () => { this.stop(); this.go(Number(this.scrubber.value)); },
    });
    this.output = html("output", { id: "time-text", for: "time" });
    return html("div", { class: "player", role: "group", "aria-label": "Animation of the tile order" },
      this.button,
      html("button", { type: "button", id: "back", "aria-label": "One wave back", onclick: () => this.step(-1) }, "−"),
      html("button", { type: "button", id: "step", "aria-label": "One wave on", onclick: () => this.step(1) }, "+"),
      this.scrubber, this.output);
  }

  draw() {
    if (!this.found) return;
    const colours = Object.fromEntries(
      ["empty", "early", "late", "now"].map((name) => [name, colour(`--tile-${name}`)]));
    for (const grid of this.grids) grid.draw(Math.floor(this.seen), colours);
  }

  go(seen) {
    const { tiles, programs } = this.found;
    this.seen = Math.min(Math.max(seen, 1), tiles);
    this.scrubber.value = Math.floor(this.seen);
    const wave = Math.ceil(this.seen / programs), waves = Math.ceil(tiles / programs);
    this.output.textContent = `wave ${wave} of ${waves}`;
    this.scrubber.setAttribute("aria-valuetext", `${Math.floor(this.seen)} tiles, ${this.output.textContent}`);
    this.draw();
  }

  // To the end of the next wave, or of the one before.
  step(by) {
    this.stop();
    const { programs } = this.found;
    const wave = by > 0 ? Math.floor(this.seen / programs) + 1 : Math.ceil(this.seen / programs) - 1;
    this.go(wave * programs);
  }

  play() {
    const { tiles, programs } = this.found, waves = Math.ceil(tiles / programs);
    if (this.seen >= tiles) this.seen = 0;
    this.button.textContent = "Pause";
    if (still.matches) {
      // Wave by wave, and nothing moves in between.
      const next = () => {
        this.go((Math.floor(this.seen / programs) + 1) * programs);
        if (this.seen >= tiles) this.stop();
      };
      const timer = setInterval(next, PAUSE);
      this.playing = () => clearInterval(timer);
      return;
    }
    const speed = tiles / Math.max(FILM, waves * WAVE);
    let before = null, frame = null;
    const turn = (now) => {
      this.go(this.seen + (before === null ? 0 : (now - before) * speed));
      before = now;
      if (this.seen >= tiles) this.stop();
      else frame = requestAnimationFrame(turn);
    };
    frame = requestAnimationFrame(turn);
    this.playing = () => cancelAnimationFrame(frame);
  }

  stop() {
    if (this.playing === null) return;
    this.playing();
    this.playing = null;
    this.button.textContent = "Play";
  }
}
