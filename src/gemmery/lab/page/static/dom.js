// Elements from a tag, attributes and children. Text is always text: nothing that a server says becomes markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// A section's heading, with what it is about beside it.
export function heading(id, text, aside = "") {
  return html("div", { class: "heading" }, html("h2", { id: `${id}-title` }, text), aside && html("p", {}, aside));
}

// The resolved colour behind a custom property, for canvases.
export function colour(name) {
  const probe = html("span", { hidden: true, style: { color: `var(${name})` } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found.match(/[\d.]+/g).slice(0, 3).map(Number);
}
