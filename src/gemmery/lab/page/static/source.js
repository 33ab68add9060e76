// Where answers come from: the server that served the page, or the file itself where it was exported with them.

export class Refused extends Error {
  // The product can't be computed; `field` is the control that this is about.
  constructor(error) {
    super(error.message);
    this.field = error.field;
  }
}

class Server {
  fixed = false;

  async options() {
    return (await fetch("api/options")).json();
  }

  async answer(query, signal) {
    const response = await fetch(`api/product?${new URLSearchParams(query)}`, { signal });
    const found = await response.json();
    if (response.status === 400) throw new Refused(found.error);
    if (!response.ok) throw new Error(found.error.message);
    return found;
  }
}

class Embedded {
  fixed = true;

  constructor(data) {
    this.data = data;
  }

  async options() {
    return this.data.options;
  }

  async answer(query) {
    const found = this.data.answers[new URLSearchParams(query).toString()];
    if (found === undefined) {
      throw new Refused({ field: "shape", message: "This product is not in the file; choose one that is." });
    }
    if (found.error) throw new Refused(found.error);
    return found;
  }
}

export function source() {
  const data = document.getElementById("answers");
  return data === null ? new Server() : new Embedded(JSON.parse(data.textContent));
}
