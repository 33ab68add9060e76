// The roofline plot: both axes logarithmic, ends and ticks as the server gives them.

import { heading, html, svg } from "lab/dom";

const HEIGHT = 280, LEFT = 56, RIGHT = 22, TOP = 26, BOTTOM = 44, LEAST = 240;

function scale(axis, from, to) {
  const [low, high] = [Math.log(axis.from), Math.log(axis.to)];
  return (value) => from + ((Math.log(value) - low) / (high - low)) * (to - from);
}

function grid(found, x, y, right) {
  const bottom = HEIGHT - BOTTOM;
  const upright = found.x.ticks.flatMap(({ value, text }) => [
    svg("line", { class: "grid", x1: x(value), x2: x(value), y1: TOP, y2: bottom }),
    svg("text", { x: x(value), y: bottom + 17, "text-anchor": "middle" }, text),
  ]);
  const level = found.y.ticks.flatMap(({ value, text }) => [
    svg("line", { class: "grid", x1: LEFT, x2: right, y1: y(value), y2: y(value) }),
    svg("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, text),
  ]);
  return [
    ...upright, ...level,
    svg("text", { x: (LEFT + right) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, found.x.unit),
    svg("text", { x: LEFT - 8, y: TOP - 13, "text-anchor": "start" }, found.y.unit),
  ];
}

function plot(found, width) {
  const right = width - RIGHT;
  const x = scale(found.x, LEFT, right), y = scale(found.y, HEIGHT - BOTTOM, TOP);
  const at = x(found.intensity.value);
  const roof = found.roof.map(([intensity, rate]) => `${x(intensity)},${y(rate)}`).join(" ");
  // gemmery's point last, so that it lies on top.
  const points = found.points.toReversed().map(({ name, rate }) =>
    svg("circle", { class: `point ${name}`, cx: at, cy: y(rate.value), r: name === "gemmery" ? 6 : 5 }));
  return svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": found.text },
    grid(found, x, y, right),
    svg("line", { class: "room", x1: at, x2: at, y1: y(found.attainable.value), y2: HEIGHT - BOTTOM }),
    svg("polyline", { class: "roof", points: roof }),
    points);
}

export class Roofline {
  constructor(section) {
    this.section = section;
    this.frame = html("div", { class: "plot" });
    // Drawn as wide as there is room, so that its text is as large everywhere.
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  show(answer) {
    this.found = answer.roofline;
    const legend = html("ul", { class: "legend" }, this.found.points.map(({ name, rate }) =>
      html("li", { class: name }, `${name === "cublas" ? answer.vendor : name} `,
        html("strong", { id: `${name}-point` }, rate.text))));
    this.section.replaceChildren(
      heading("roofline", "Under the roofline", this.found.where), this.frame, legend,
      html("p", { id: "roofline-text" }, this.found.text),
      ...(this.found.mark ? [html("p", { class: "mark" }, this.found.mark)] : []));
    this.draw();
  }

  draw() {
    if (this.found) this.frame.replaceChildren(plot(this.found, Math.max(this.frame.clientWidth, LEAST)));
  }
}
