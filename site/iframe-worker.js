/* Searches when the pages are opened as files. Browsers start no worker from a file, so the worker's script runs in a hidden frame
   that takes and sends the same messages. Named iframe-worker because the theme loads a script of this purpose from another host if
   no name contains that. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<!doctype html><script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {
          const script = document.createElement("script");
          script.src = url;
          script.onload = done;
          document.body.append(script);
        })), Promise.resolve());
      <\/script><body><script src="${new URL(url, document.baseURI)}"><\/script>`;
      this.ready = new Promise((done) => { frame.onload = () => done(frame.contentWindow); });
      addEventListener("message", (event) => {
        if (event.source === frame.contentWindow) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
      document.body.append(frame);
    }
    postMessage(data) { this.ready.then((frame) => frame.dispatchEvent(new MessageEvent("message", { data }))); }
    terminate() {}
  };
}
