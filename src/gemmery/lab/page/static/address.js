// The product is part of the page's address, so that it can be shared, and the browser's back button works.

export class Address {
  // A file's address takes no queries that change: an exported page keeps the product behind the #.
  constructor(fields, fixed) {
    this.fields = fields;
    this.mark = fixed ? "#" : "?";
  }

  read() {
    const given = new URLSearchParams(this.mark === "#" ? location.hash.slice(1) : location.search);
    return Object.fromEntries(this.fields.filter((name) => given.has(name)).map((name) => [name, given.get(name)]));
  }

  // With `keep`, the product before can be gone back to.
  write(query, keep) {
    const text = `${this.mark}${new URLSearchParams(query)}`;
    if (text === (this.mark === "#" ? location.hash : location.search)) return;
    if (keep) history.pushState(null, "", text);
    else history.replaceState(null, "", text);
  }
}
