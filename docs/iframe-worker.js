// Opened from a folder a page may start no worker, so the search's runs in a frame that nobody sees.
// (Its name is what Material's offline plugin looks for before it takes such a script from another host.)
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(script) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.answer = data => this.dispatchEvent(new MessageEvent("message", { data }))
      frame.srcdoc = `<script>postMessage = data => frameElement.answer(data)</script><script src="${script}"></script>`
      this.frame = new Promise(loaded => (frame.onload = () => loaded(frame.contentWindow)))
      document.body.append(frame)
    }
    async postMessage(data) {
      const frame = await this.frame
      frame.dispatchEvent(new frame.MessageEvent("message", { data }))
    }
  }
