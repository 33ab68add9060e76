// The controls: made from what the server offers, and kept in step with the product.

import { html } from "lab/dom";

const LABELS = {
  gpu: "GPU", dtype: "Type", layout: "Layout of A and B", epilogue: "Epilogue", weight: "Weight format",
};
const SIZES = { M: "M, rows of A", N: "N, columns of B", K: "K, the inner size" };

export class Controls {
  // `changed(query, done)` is told of every change; `done` is false while a slider is still moving.
  constructor(form, options, query, changed) {
    this.form = form;
    this.options = options;
    this.query = { ...query };
    this.changed = changed;
    this.inputs = {};
    form.addEventListener("submit", (event) => event.preventDefault());
    const choice = (name) => this.#select(name, LABELS[name], options.controls[name]);
    const sizes = options.shapes
      ? [this.#shapes()]
      : [this.#presets(), ...Object.keys(SIZES).map((name) => this.#size(name))];
    form.append(
      choice("gpu"),
      html("fieldset", {}, html("legend", {}, "Sizes"), sizes),
      ...["dtype", "weight", "epilogue", "layout"].map(choice),
    );
    this.show(query);
  }

  // Put the controls where a product is.
  show(query) {
    this.query = { ...query };
    for (const [name, input] of Object.entries(this.inputs)) input.show(query[name], query);
  }

  // What is wrong, next to the control that it is about; false if there is none.
  refuse(field, message) {
    this.accept();
    return this.note(field, message);
  }

  note(field, message) {
    const input = this.inputs[field];
    if (!input) return false;
    input.element.setAttribute("aria-invalid", "true");
    input.error.textContent = message;
    return true;
  }

  // Whether nothing is chosen where something has to be.
  isBlank(field) {
    const element = this.inputs[field]?.element;
    return element?.tagName === "SELECT" && element.selectedIndex < 0;
  }

  accept() {
    for (const { element, error } of Object.values(this.inputs)) {
      element.removeAttribute("aria-invalid");
      error.textContent = "";
    }
  }

  #set(changes, done) {
    this.show({ ...this.query, ...changes });
    this.changed({ ...this.query }, done);
  }

  #field(name, element, show, ...around) {
    const error = html("p", { class: "error", id: `${name}-error`, role: "alert" });
    element.setAttribute("aria-describedby", error.id);
    this.inputs[name] = { element, error, show };
    return html("div", { class: "field" }, around, error);
  }

  #select(name, label, choices) {
    const element = html(
      "select",
      { id: name, name, onchange: () => this.#set({ [name]: element.value }, true) },
      choices.map(({ value, text }) => html("option", { value }, text)),
    );
    element.disabled = choices.length < 2;
    // An address may name what there is not: nothing is selected then, until the page falls back to the default.
    const show = (value) => (element.value = value);
    return this.#field(name, element, show, html("label", { for: name }, label), element);
  }

  #size(name) {
    const { least, most, stops } = this.options.sizes;
    const number = html("input", {
      id: name, name, type: "number", min: least, max: most, step: 1, inputmode: "numeric",
      oninput: () => number.value && this.#set({ [name]: number.value }, false),
      onchange: () => this.#set({ [name]: number.value }, true),
    });
    const slider = html("input", {
      id: `${name}-slider`, type: "range", min: 0, max: stops.length - 1, step: 1, "aria-label": `${name}, slider`,
      oninput: () => this.#set({ [name]: String(stops[slider.value]) }, false),
      onchange: () => this.#set({ [name]: String(stops[slider.value]) }, true),
    });
    const show = (value) => {
      number.value = value;
      const above = stops.findIndex((stop) => stop >= Number(value));
      slider.value = above < 0 ? stops.length - 1 : above;
      slider.setAttribute("aria-valuetext", value);
    };
    const label = html("label", { for: name }, SIZES[name]);
    return this.#field(name, number, show, html("div", { class: "size" }, label, number, slider));
  }

  #presets() {
    const { presets, rows } = this.options;
    const layers = presets.flatMap(({ layers }) => layers);
    const groups = presets.map(({ model, layers: its }) =>
      html("optgroup", { label: model }, its.map((layer) =>
        html("option", { value: layers.indexOf(layer) }, `${model} ${layer.name}`))));
    const element = html("select", {
      id: "preset",
      onchange: () => {
        const layer = layers[element.value];
        if (layer) this.#set({ N: String(layer.N), K: String(layer.K) }, true);
      },
    }, html("option", { value: "" }, "custom sizes"), groups);
    const buttons = rows.map((M) =>
      html("button", { type: "button", "data-rows": M, onclick: () => this.#set({ M: String(M) }, true) }, String(M)));
    const show = (_, { M, N, K }) => {
      const same = (layer) => String(layer.N) === N && String(layer.K) === K;
      const chosen = layers[element.value];
      if (!chosen || !same(chosen)) {
        const found = layers.findIndex(same);
        element.value = found < 0 ? "" : found;
      }
      for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.rows === M));
    };
    return this.#field(
      "preset", element, show,
      html("label", { for: "preset" }, "A model's layer"), element,
      html("div", { class: "rows", role: "group", "aria-label": "Rows, M" }, html("span", {}, "M"), buttons),
    );
  }

  #shapes() {
    const { shapes } = this.options;
    const element = html("select", {
      id: "shape",
      onchange: () => {
        const { M, N, K } = shapes[element.value];
        this.#set({ M, N, K }, true);
      },
    }, shapes.map(({ text }, index) => html("option", { value: index }, text)));
    element.disabled = shapes.length < 2;
    const show = (_, query) =>
      (element.value = shapes.findIndex(({ M, N, K }) => M === query.M && N === query.N && K === query.K));
    return this.#field("shape", element, show, html("label", { for: "shape" }, "M × N × K"), element);
  }
}
