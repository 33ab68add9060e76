// The search runs in a worker, and browsers refuse workers to a page that is opened from the disk. There, an
// invisible frame takes its place: it runs the same script, with the two calls that a worker has and a page has not.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      const inside = (this.inside = frame.contentWindow)
      // Scripts load one after the other, in the order in which they are asked for.
      let loaded = Promise.resolve()
      inside.importScripts = (...urls) => {
        for (const each of urls) loaded = loaded.then(() => load(inside.document, each))
        return loaded
      }
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = load(inside.document, url)
    }
    postMessage(data) {
      const inside = this.inside
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }

  function load(page, url) {
    return new Promise((done, failed) => {
      const script = page.createElement("script")
      Object.assign(script, { src: new URL(url, location).href, onload: done, onerror: failed })
      page.head.append(script)
    })
  }
}
