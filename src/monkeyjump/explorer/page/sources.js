"use strict";
/* Where the explorer takes its data from: the server of this page, or views that were recorded into the page. */

class LiveSource {
  constructor() { this.live = true; }

  /* What the address brings is kept for reloads, but not in the address, which somebody may copy. */
  token() {
    const hash = new URLSearchParams(location.hash.slice(1));
    if (hash.has("token")) {
      sessionStorage.setItem("mj-token", hash.get("token"));
      hash.delete("token");
      history.replaceState(null, "", "#" + hash);
    }
    return sessionStorage.getItem("mj-token");
  }

  async ask(path, options = {}) {
    const token = this.token();
    const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
    let response;
    try {
      response = await fetch(`api/${path}`, { ...options, headers });
    } catch (error) {
      throw error.name === "AbortError" ? error : new Error(LiveSource.gone);
    }
    if (!response.ok) {
      const said = await response.json().catch(() => ({}));
      throw new Error(said.error || `The server answered with status ${response.status}.`);
    }
    return response;
  }

  post(path, asked, signal) {
    const headers = { "Content-Type": "application/json" };
    return this.ask(path, { method: "POST", body: JSON.stringify(asked), headers, signal });
  }

  async about() { return (await this.ask("about")).json(); }

  async view(asked, signal) { return (await this.post("view", asked, signal)).json(); }

  async picture(file) { return (await (await this.ask("picture", { method: "POST", body: file })).json()).picture; }

  /* One event for each token. */
  async generate(asked, signal, take) {
    const reader = (await this.post("generate", asked, signal)).body.getReader();
    const decoder = new TextDecoder();
    let rest = "", ended = false;
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new Error(LiveSource.gone);
      });
      if (done) break;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const event = JSON.parse(line);
        if (event.error) throw new Error(event.error);
        ended ||= "end" in event;
        take(event);
      }
    }
    if (!ended) throw new Error(LiveSource.gone);
  }
}
LiveSource.gone = "The server does not answer. Start it again (monkeyjump explore); what you see stays here.";

class RecordedSource {
  constructor(views) {
    this.views = views;
    this.live = false;
    this.prompts = [...new Set(views.map((view) => view.prompt))];
  }

  async about() {
    const names = [...new Set(this.views.map((view) => view.adapter))].filter((name) => name !== "base");
    return { model: "", adapters: names.map((name) => ({ name, tasks: [], usage: null })), pictures: false };
  }

  async view(asked) {
    const found = this.views.find((view) => view.prompt === asked.prompt && view.adapter === asked.adapter);
    if (!found) throw new Error(`Nothing was recorded of ${asked.adapter} for this prompt.`);
    return found;
  }
}

for (const root of document.querySelectorAll(".mj-explorer")) {
  const recorded = root.dataset.recorded;
  const source = recorded ? new RecordedSource(JSON.parse(document.getElementById(recorded).textContent)) : new LiveSource();
  new Explorer(root, source).start();
}
