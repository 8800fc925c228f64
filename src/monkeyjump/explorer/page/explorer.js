"use strict";
/* The explorer: tokens, blocks and experts of one prompt, for one side or two. All texts enter as textContent. */

const COLOURS = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999"]; // Okabe-Ito
const BASE = "base", NONE = 255, GUTTER = 34;

/* An element with properties and children; strings become text. */
function el(tag, properties = {}, ...children) {
  const { data, ...rest } = properties;
  const element = Object.assign(document.createElement(tag), rest);
  Object.assign(element.dataset, data);
  element.append(...children);
  return element;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const visible = (text) => text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍") || "∅";

/* Colour and letter of an expert, by its name: the same in all blocks and on both sides. */
const looks = new Map();
function look(name) {
  if (!looks.has(name)) {
    const index = looks.size % COLOURS.length, taken = [...looks.values()].map(({ letter }) => letter);
    const number = name.match(/^expert (\d+)$/)?.[1];
    const letter = number ?? [...name.toUpperCase()].find((c) => /[A-Z]/.test(c) && !taken.includes(c)) ?? String(looks.size);
    looks.set(name, { letter, colour: COLOURS[index], ink: index === 4 ? "#fff" : "#111" });
  }
  return looks.get(name);
}

function numbers(text, scale) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return Float32Array.from(new Uint16Array(bytes.buffer), (value) => (value / 65535) * scale);
}

/* The routing of one side: a row of gates for each token, the experts of all blocks side by side. */
class Routing {
  constructor(view) {
    this.tokens = [];
    this.blocks = [];
    this.width = 0;
    for (const [key, experts] of view.blocks) {
      this.blocks.push({ key, experts, looks: experts.map(look), from: this.width });
      this.width += experts.length;
    }
    this.gates = [];
    this.probabilities = [];
    this.strongest = []; // by token: the strongest expert of each block
    this.next = view.next;
    this.prompt = view.tokens.length;
    this.text = "";
    this.end = "";
    this.add(view.tokens, view);
  }

  add(tokens, packed) {
    const gates = numbers(packed.gates, packed.scale);
    const wide = packed.probabilities ? numbers(packed.probabilities, packed.scale) : gates;
    tokens.forEach((token, t) => {
      const row = gates.subarray(t * this.width, (t + 1) * this.width);
      this.tokens.push(token);
      this.gates.push(row);
      this.probabilities.push(wide.subarray(t * this.width, (t + 1) * this.width));
      this.strongest.push(Uint8Array.from(this.blocks, ({ experts, from }) => {
        let best = NONE, most = 0;
        for (let e = 0; e < experts.length; e++) if (row[from + e] > most) { most = row[from + e]; best = e; }
        return best;
      }));
    });
  }

  /* Of all jumps in a block, the part that went to each expert. */
  shares(b) {
    const { experts, from } = this.blocks[b];
    const jumps = experts.map((_, e) => this.gates.reduce((sum, row) => sum + (row[from + e] > 0), 0));
    const all = jumps.reduce((a, c) => a + c, 0) || 1;
    return jumps.map((count) => count / all);
  }

  nameOf(t, b) {
    const best = this.strongest[t]?.[b] ?? NONE;
    return best === NONE ? null : this.blocks[b].experts[best];
  }
}

class Explorer {
  constructor(root, source) {
    this.root = root;
    this.source = source;
    this.state = { prompt: "", block: 0, token: 0, left: "", right: "", task: "", off: {}, usage: "" };
    this.sides = []; // {spec, key, routing, panel}
    this.hover = null;
    this.picture = null;
    this.running = null; // what can be stopped
    this.drawing = false;
  }

  start() {
    this.build();
    if (this.source.live) addEventListener("hashchange", () => (this.about ? this.restore() : this.connect()));
    this.connect();
  }

  /* Learn what there is to look at; a second call waits for the first. */
  connect() {
    this.connecting ??= this.source.about().then((about) => {
      this.about = about;
      this.fill();
      this.say("");
      this.restore();
      return true;
    }).catch((error) => this.say(error.message, true)).finally(() => { this.connecting = null; });
    return this.connecting;
  }

  async ask(generate) {
    if (!this.about && !(await this.connect())) return;
    this.state.prompt = this.at.prompt.value;
    await this.refresh(generate);
  }

  build() {
    const at = this.at = {};
    const live = this.source.live;
    at.status = el("p", { className: "status", role: "status" });
    at.status.setAttribute("aria-live", "polite");
    at.prompt = live
      ? el("textarea", { rows: 3, placeholder: "Type a prompt and press Enter", ariaLabel: "Prompt", dir: "auto" })
      : el("select", { ariaLabel: "Prompt" });
    at.run = el("button", { className: "primary", textContent: "Show routing", title: "Enter" });
    at.generate = el("button", { textContent: "Generate", title: "Ctrl+Enter" });
    at.stop = el("button", { textContent: "Stop", disabled: true, title: "Escape" });
    at.temperature = el("input", { type: "number", min: 0, max: 10, step: 0.1, value: 0, title: "0 takes the likeliest token" });
    at.most = el("input", { type: "number", min: 1, max: 1024, value: 32 });
    at.left = el("select");
    at.right = el("select");
    at.task = el("select");
    at.file = el("input", { type: "file", accept: "image/*" });
    at.preview = el("img", { alt: "", hidden: true });
    at.without = el("button", { className: "small", textContent: "Take it away", hidden: true });
    at.slider = el("input", { type: "range", min: 0, max: 0, value: 0, ariaLabel: "Block" });
    at.blockName = el("output");
    at.sides = el("div", { className: "sides" });
    at.differs = el("p", { className: "soft" });
    at.cell = el("section", { className: "panel cell" });
    at.experts = el("section", { className: "panel" });
    at.next = el("section", { className: "panel" });
    at.usage = el("section", { className: "panel" });
    const label = (text, ...inner) => el("label", {}, el("span", { textContent: text }), ...inner);
    at.taskLabel = label("Task", at.task);
    at.fileLabel = label("Picture", at.file, at.preview, at.without);
    at.about = el("p", { className: "soft" });
    at.results = el("div", { className: "results", hidden: true },
      el("div", { className: "drawn" },
        el("div", { className: "panel slider" }, label("Block", at.slider), at.blockName), at.sides, at.differs,
        el("div", { className: "under" }, at.next, at.usage)),
      el("aside", {}, at.cell, at.experts));
    this.root.append(
      el("header", {}, el("h1", { textContent: "Where the tokens go" }), at.about),
      el("div", { className: "panel ask" }, at.prompt,
        el("div", { className: "row" }, label("Side A", at.left), label("Compare with", at.right), at.taskLabel, at.fileLabel),
        live ? el("div", { className: "row" }, at.run, at.generate, at.stop, label("Temperature", at.temperature), label("Most tokens", at.most)) : ""),
      at.status, at.results);
    this.listen();
  }

  listen() {
    const { at } = this;
    if (this.source.live) {
      at.run.onclick = () => this.ask(false);
      at.generate.onclick = () => this.ask(true);
      at.stop.onclick = () => this.running?.abort();
      at.prompt.onkeydown = (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        this.ask(event.ctrlKey || event.metaKey);
      };
      at.file.onchange = () => this.take(at.file.files[0]);
      at.without.onclick = () => { this.picture = null; at.file.value = ""; at.preview.hidden = at.without.hidden = true; };
      this.root.addEventListener("dragover", (event) => event.preventDefault());
      this.root.addEventListener("drop", (event) => { event.preventDefault(); this.take(event.dataTransfer.files[0]); });
    } else {
      at.prompt.onchange = () => this.ask(false);
    }
    at.slider.oninput = () => this.show({ block: Number(at.slider.value) });
    for (const name of ["left", "right", "task"]) {
      at[name].onchange = () => {
        this.state[name] = at[name].value;
        if (name !== "task") this.state.off = {};
        this.choices();
        if (this.state.prompt || this.picture) this.refresh(false);
      };
    }
    addEventListener("keydown", (event) => this.key(event));
    addEventListener("resize", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  key(event) {
    if (event.key === "Escape") this.running?.abort();
    const busy = /^(TEXTAREA|INPUT|SELECT)$/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey;
    if (busy || !this.source.live && !this.root.contains(event.target)) return;
    const { token, block } = this.state;
    const moves = { ArrowLeft: { token: token - 1 }, ArrowRight: { token: token + 1 }, ArrowUp: { block: block - 1 }, ArrowDown: { block: block + 1 } };
    if (event.key === "/" && this.source.live) { event.preventDefault(); this.at.prompt.focus(); }
    if (!moves[event.key] || !this.sides.length) return;
    event.preventDefault();
    this.hover = null;
    this.show(moves[event.key], true);
  }

  fill() {
    const { at, about } = this;
    at.about.textContent = [about.model, ...about.adapters.map((adapter) => adapter.name)].filter(Boolean).join(" · ");
    at.fileLabel.hidden = !about.pictures;
    this.state.left = about.adapters[0]?.name ?? BASE;
    if (!this.source.live) at.prompt.append(...this.source.prompts.map((text) => el("option", { value: text, textContent: text })));
    this.choices();
  }

  choices() {
    const { at, about, state } = this;
    const names = [...about.adapters.map((adapter) => adapter.name), BASE];
    const option = (chosen) => (name) => el("option", { value: name, textContent: name || "nothing", selected: name === chosen });
    if (!names.includes(state.left)) state.left = names[0];
    if (!names.includes(state.right) || state.right === state.left) state.right = "";
    at.left.replaceChildren(...names.map(option(state.left)));
    at.right.replaceChildren(...["", ...names.filter((name) => name !== state.left)].map(option(state.right)));
    const tasks = [...new Set(about.adapters.filter((a) => [state.left, state.right].includes(a.name)).flatMap((a) => a.tasks))];
    if (!tasks.includes(state.task)) state.task = tasks[0] ?? "";
    at.task.replaceChildren(...tasks.map(option(state.task)));
    at.taskLabel.hidden = !tasks.length;
  }

  async take(file) {
    if (!file || !this.about.pictures) return;
    try {
      this.picture = await this.source.picture(file);
    } catch (error) {
      this.say(error.message, true);
      return;
    }
    this.at.preview.src = URL.createObjectURL(file);
    this.at.preview.hidden = this.at.without.hidden = false;
    this.state.prompt = this.at.prompt.value;
    this.refresh(false);
  }

  /* -- what is asked ------------------------------------------------------------------------------------------- */

  /* The second side: that of the comparison, or, if experts are off, this or A without them. */
  second() {
    const { left, right, off } = this.state;
    if (Object.keys(off).length) return { adapter: right && right !== BASE ? right : left, off };
    return right ? { adapter: right, off: {} } : null;
  }

  /* An address says "*" for all blocks that have an expert. */
  spread() {
    const { "*": everywhere = [], ...off } = this.state.off;
    for (const { key, experts } of this.blocks()) {
      const names = new Set([...(off[key] ?? []), ...experts.filter((name) => everywhere.includes(name))]);
      if (names.size) off[key] = [...names].sort();
    }
    this.state.off = off;
  }

  gathered() {
    const off = structuredClone(this.state.off);
    for (const name of new Set(Object.values(off).flat())) {
      const keys = this.blocks().filter(({ experts }) => experts.includes(name)).map(({ key }) => key);
      if (keys.length < 2 || !keys.every((key) => off[key]?.includes(name))) continue;
      for (const key of keys) off[key] = off[key].filter((other) => other !== name);
      off["*"] = [...(off["*"] ?? []), name];
    }
    return Object.fromEntries(Object.entries(off).filter(([, names]) => names.length));
  }

  async refresh(generate) {
    const { state } = this;
    this.running?.abort();
    if (!state.prompt.trim() && !this.picture) {
      this.say("Type a prompt first.", true);
      return;
    }
    const running = this.running = new AbortController();
    this.at.stop.disabled = false;
    this.say("Reading the prompt …");
    const before = this.sides;
    const read = async (spec) => {
      const asked = { prompt: state.prompt, ...spec, ...(state.task && { task: state.task }), ...(this.picture && { picture: this.picture }) };
      const key = JSON.stringify(asked);
      const routing = before.find((side) => side.key === key)?.routing ?? new Routing(await this.source.view(asked, running.signal));
      running.signal.throwIfAborted();
      return { spec, key, asked, routing };
    };
    try {
      const first = await read({ adapter: state.left, off: {} });
      this.sides = [first];
      this.spread();
      try {
        const second = this.second();
        if (second) this.sides = [first, await read(second)];
      } finally {
        this.rebuild();
        this.remember();
      }
      this.say("");
      const { how } = first.routing;
      if (generate || how && how !== this.sides[1]?.routing.how) await this.continue(running, generate ? null : how);
    } catch (error) {
      if (error.name === "AbortError") { if (this.running === running) this.say("Stopped."); } else this.say(error.message, true);
    } finally {
      if (this.running === running) { this.running = null; this.at.stop.disabled = true; }
    }
  }

  /* Generate on every side that has not been continued in this way yet. */
  async continue(running, how) {
    const seed = Math.floor(Math.random() * 2 ** 31);
    how ??= JSON.stringify({ temperature: Number(this.at.temperature.value), most: Number(this.at.most.value), seed });
    for (const side of this.sides) {
      if (side.routing.how === how) continue;
      if (side.routing.how) side.routing = new Routing(await this.source.view(side.asked, running.signal));
      side.routing.how = how;
      this.rebuild();
      this.say(`Generating with ${title(side.spec)} …`);
      await this.source.generate({ ...side.asked, ...JSON.parse(how) }, running.signal, (event) => {
        if (event.token === undefined) { side.routing.end = event.end; return; }
        side.routing.add([event.token], event);
        side.routing.text = event.text;
        this.grow(side);
      });
      this.grow(side);
    }
    this.say("");
    this.details();
    this.show({});
  }

  say(text, wrong = false) {
    this.at.status.textContent = text;
    this.at.status.classList.toggle("wrong", wrong);
  }

  /* -- the address ---------------------------------------------------------------------------------------------- */

  remember() {
    if (!this.source.live) return;
    const { prompt, block, left, right, task, off } = this.state;
    const key = this.blocks()[block]?.key ?? "";
    const kept = { prompt, block: key, left, right, task, off: Object.keys(off).length ? JSON.stringify(this.gathered()) : "" };
    const hash = new URLSearchParams(Object.entries(kept).filter(([, value]) => value));
    history.replaceState(null, "", "#" + hash);
  }

  restore() {
    if (!this.source.live) {
      this.state.prompt = this.at.prompt.value;
      if (this.state.prompt) this.refresh(false);
      return;
    }
    const hash = new URLSearchParams(location.hash.slice(1));
    for (const name of ["prompt", "left", "right", "task"]) this.state[name] = hash.get(name) ?? "";
    this.state.off = {};
    try {
      const off = JSON.parse(hash.get("off") ?? "{}");
      if (Object.values(off).every(Array.isArray)) this.state.off = off;
    } catch { /* an address that somebody has changed */ }
    this.wantedBlock = hash.get("block");
    this.choices();
    this.at.prompt.value = this.state.prompt || this.at.prompt.value; // somebody may have typed already
    if (this.state.prompt) this.refresh(false);
  }

  /* -- drawing -------------------------------------------------------------------------------------------------- */

  blocks() { return (this.sides.find((side) => side.routing.blocks.length) ?? this.sides[0])?.routing.blocks ?? []; }

  /* Make the panels of both sides anew. */
  rebuild() {
    const { at, state } = this;
    const blocks = this.blocks();
    const wanted = blocks.findIndex((block) => block.key === this.wantedBlock);
    if (wanted >= 0) state.block = wanted;
    this.wantedBlock = null;
    at.results.hidden = false;
    at.slider.max = Math.max(0, blocks.length - 1);
    at.sides.classList.toggle("two", this.sides.length > 1);
    at.sides.replaceChildren(...this.sides.map((side) => this.panel(side)));
    for (const side of this.sides) this.grow(side);
    this.details();
    this.show({});
  }

  panel(side) {
    const drawn = side.drawn = {
      tokens: el("div", { className: "tokens", ariaLabel: "Tokens" }),
      text: el("p", { className: "text", dir: "auto" }),
      canvas: el("canvas", { tabIndex: 0, ariaLabel: "Blocks by tokens; arrow keys move" }),
      space: el("div"),
    };
    drawn.scroller = el("div", { className: "grid" }, drawn.space);
    drawn.space.append(drawn.canvas);
    drawn.scroller.onscroll = () => {
      for (const other of this.sides) if (other.drawn.scroller.scrollLeft !== drawn.scroller.scrollLeft) other.drawn.scroller.scrollLeft = drawn.scroller.scrollLeft;
      this.draw();
    };
    const chip = (event) => event.target.closest?.("[data-t]");
    drawn.tokens.onpointerover = (event) => { if (chip(event)) this.point(side, Number(chip(event).dataset.t), this.state.block); };
    drawn.tokens.onclick = (event) => { if (chip(event)) this.show({ token: Number(chip(event).dataset.t) }); };
    drawn.tokens.onpointerleave = drawn.canvas.onpointerleave = () => this.point(null);
    drawn.canvas.onpointermove = (event) => { const cell = this.cellAt(side, event); if (cell) this.point(side, ...cell); };
    drawn.canvas.onclick = (event) => { const cell = this.cellAt(side, event); if (cell) this.show({ token: cell[0], block: cell[1] }); };
    const routed = side.routing.blocks.length > 0;
    drawn.scroller.hidden = !routed;
    const note = routed ? "" : side.spec.adapter === BASE ? "The base model has no experts." : "This adapter routes nothing that could be drawn.";
    return el("section", { className: "panel side" }, el("h2", { textContent: title(side.spec) }),
      el("p", { className: "soft", textContent: note, hidden: routed }), drawn.tokens, drawn.text, drawn.scroller);
  }

  /* Add the chips of tokens that are new. */
  grow(side) {
    const { routing, drawn } = side;
    const fresh = document.createDocumentFragment();
    for (let t = drawn.tokens.childElementCount; t < routing.tokens.length; t++) {
      fresh.append(el("bdi", { className: t < routing.prompt ? "chip" : "chip made", textContent: visible(routing.tokens[t]), data: { t } }));
    }
    const first = drawn.tokens.childElementCount;
    drawn.tokens.append(fresh);
    this.paint(side, first);
    drawn.text.textContent = routing.text;
    drawn.text.hidden = !routing.how;
    drawn.text.dataset.end = routing.end;
    this.draw();
  }

  /* Colour the chips from a token on, by the strongest expert of the chosen block. */
  paint(side, from = 0) {
    const { routing, drawn } = side;
    const chips = drawn.tokens.children, b = this.state.block, other = this.sides[0] === side ? null : this.sides[0];
    for (let t = from; t < chips.length; t++) {
      const best = routing.strongest[t][b] ?? NONE, chip = chips[t];
      const { letter, colour, ink } = best === NONE ? { letter: "", colour: "", ink: "" } : routing.blocks[b].looks[best];
      if (chip.dataset.letter !== letter) { // most steps change few of them
        chip.style.backgroundColor = colour;
        chip.style.color = ink;
        chip.dataset.letter = letter;
      }
      chip.classList.toggle("differs", other !== null && this.differs(side, other, t, b));
      chip.classList.toggle("chosen", t === this.state.token);
    }
  }

  differs(side, other, t, b) {
    if (t >= other.routing.tokens.length) return other.routing.end !== "";
    if (side.routing.tokens[t] !== other.routing.tokens[t]) return true;
    if (!side.routing.blocks.length || !other.routing.blocks.length) return false;
    return side.routing.nameOf(t, b) !== other.routing.nameOf(t, b);
  }

  /* Change the block or the token that is looked at. */
  show(change, follow = false) {
    const { state, at } = this;
    const before = state.block, blocks = this.blocks(), tokens = Math.max(1, ...this.sides.map((side) => side.routing.tokens.length));
    Object.assign(state, change);
    state.block = Math.max(0, Math.min(state.block, blocks.length - 1));
    state.token = Math.max(0, Math.min(state.token, tokens - 1));
    at.slider.value = state.block;
    at.blockName.textContent = blocks.length ? `${blocks[state.block].key} (${state.block + 1} of ${blocks.length})` : "none";
    for (const side of this.sides) this.paint(side);
    if (follow) this.follow();
    this.cell();
    this.expertPanel();
    for (const [b, row] of [...at.usage.querySelectorAll(".stack")].entries()) row.classList.toggle("chosen", b === state.block);
    if (before !== state.block) { // browsers limit how often an address changes
      clearTimeout(this.remembering);
      this.remembering = setTimeout(() => this.remember(), 200);
    }
    this.draw();
  }

  /* Bring the chosen token into view in the grids. */
  follow() {
    for (const { drawn } of this.sides) {
      const x = this.state.token * (drawn.cellWidth ?? 0), seen = drawn.scroller.clientWidth - GUTTER - (drawn.cellWidth ?? 0);
      if (x < drawn.scroller.scrollLeft || x > drawn.scroller.scrollLeft + seen) drawn.scroller.scrollLeft = x - seen / 2;
    }
  }

  point(side, t, b) {
    this.hover = side ? { t, b } : null;
    this.cell();
    this.draw();
  }

  cellAt(side, event) {
    const { drawn, routing } = side;
    const t = Math.floor((event.offsetX - GUTTER + drawn.scroller.scrollLeft) / drawn.cellWidth);
    const b = Math.floor(event.offsetY / drawn.cellHeight);
    const inside = event.offsetX >= GUTTER && t >= 0 && t < routing.tokens.length && b >= 0 && b < routing.blocks.length;
    return inside ? [t, b] : null;
  }

  draw() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      for (const side of this.sides) this.drawGrid(side);
    });
  }

  /* Only the columns that can be seen are drawn. */
  drawGrid(side) {
    const { routing, drawn } = side, B = routing.blocks.length, T = routing.tokens.length;
    const width = drawn.scroller.clientWidth;
    if (!B || !width) return;
    const cw = drawn.cellWidth = Math.max(7, Math.min(24, Math.floor((width - GUTTER) / T)));
    const ch = drawn.cellHeight = B > 64 ? 6 : B > 14 ? 14 : 22;
    const { canvas } = drawn, scale = devicePixelRatio || 1, height = B * ch;
    drawn.space.style.width = `${GUTTER + T * cw}px`;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const pen = canvas.getContext("2d"), inkOfPage = getComputedStyle(this.root).color, soft = getComputedStyle(this.at.about).color;
    const none = { letter: "", colour: "#8883", ink: inkOfPage };
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const left = drawn.scroller.scrollLeft, first = Math.floor(left / cw), last = Math.min(T, Math.ceil((left + width - GUTTER) / cw));
    const other = this.sides[0] === side ? null : this.sides[0], lettered = cw >= 14 && ch >= 12;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.font = "600 10px system-ui, sans-serif";
    for (let t = first; t < last; t++) {
      const x = GUTTER + t * cw - left;
      for (let b = 0; b < B; b++) {
        const best = routing.strongest[t][b], drawnAs = best === NONE ? none : routing.blocks[b].looks[best];
        pen.fillStyle = drawnAs.colour;
        pen.fillRect(x, b * ch, cw - 1, ch - 1);
        pen.fillStyle = drawnAs.ink;
        if (lettered) {
          pen.fillText(drawnAs.letter, x + cw / 2 - 0.5, b * ch + ch / 2);
        }
        if (other && this.differs(side, other, t, b)) {
          pen.beginPath();
          pen.arc(lettered ? x + cw - 4.5 : x + cw / 2 - 0.5, lettered ? b * ch + 3.5 : b * ch + ch / 2 - 0.5, 2, 0, 7);
          pen.fill();
        }
      }
    }
    pen.clearRect(0, 0, GUTTER - 1, height);
    pen.textAlign = "right";
    pen.font = "10px system-ui, sans-serif";
    for (let b = 0; b < B; b++) {
      const chosen = b === this.state.block, name = routing.blocks[b].key.split(".")[0]; // "3" of "3.q_proj"
      if (!chosen && routing.blocks[b - 1]?.key.split(".")[0] === name) continue;
      pen.fillStyle = chosen ? inkOfPage : soft;
      pen.fillText(name.slice(-5), GUTTER - 5, b * ch + ch / 2);
    }
    pen.strokeStyle = inkOfPage;
    pen.lineWidth = 1.5;
    pen.strokeRect(GUTTER - 1, this.state.block * ch - 0.5, Math.min(width, T * cw - left) , ch);
    const at = this.hover ?? { t: this.state.token, b: this.state.block };
    pen.strokeRect(GUTTER + at.t * cw - left - 0.5, at.b * ch - 0.5, cw, ch);
  }

  /* -- the panels beside ---------------------------------------------------------------------------------------- */

  details() {
    this.nextPanel();
    this.usagePanel();
    this.difference();
  }

  bar(share, colour) {
    const inner = el("i");
    inner.style.width = `${Math.min(100, 100 * share)}%`;
    if (colour) inner.style.backgroundColor = colour;
    return el("span", { className: "bar" }, inner);
  }

  swatch({ letter, colour, ink }) {
    const sign = el("b", { className: "swatch", textContent: letter });
    sign.style.backgroundColor = colour;
    sign.style.color = ink;
    return sign;
  }

  /* The gates of all experts at one token and block. */
  cell() {
    const { t, b } = this.hover ?? { t: this.state.token, b: this.state.block };
    const parts = [];
    for (const { routing, spec } of this.sides) {
      const block = routing.blocks[b];
      if (!block || t >= routing.tokens.length) continue;
      parts.push(el("p", { className: "soft" }, title(spec), ": token ", String(t + 1), " ", el("bdi", { className: "quoted", textContent: visible(routing.tokens[t]) })));
      block.experts.forEach((name, e) => {
        const gate = routing.gates[t][block.from + e], p = routing.probabilities[t][block.from + e];
        const said = gate > 0 ? gate.toFixed(3) : p > 0 ? `(${p.toFixed(3)})` : "off";
        parts.push(el("div", { className: gate > 0 ? "line" : "line below" }, this.swatch(look(name)), el("span", { className: "name", textContent: name }), this.bar(Math.max(p, gate), look(name).colour), el("span", { className: "value", textContent: said })));
      });
    }
    const some = parts.length > 0;
    this.at.cell.replaceChildren(el("h2", { textContent: `Gates in block ${this.blocks()[b]?.key ?? ""}` }), ...parts,
      el("p", { className: "soft", hidden: !some, textContent: "In brackets: what the router gave an expert that was not used." }));
    this.at.cell.hidden = !some;
  }

  expertPanel() {
    const b = this.state.block, block = this.blocks()[b];
    this.at.experts.hidden = !block;
    if (!block) return;
    const routing = this.sides.find((side) => side.routing.blocks.length).routing, shares = routing.shares(b);
    const lines = block.experts.map((name, e) => {
      const here = this.state.off[block.key]?.includes(name) ?? false;
      const everywhere = this.blocks().every(({ key, experts }) => !experts.includes(name) || this.state.off[key]?.includes(name));
      const toggle = (text, pressed, keys) => {
        const where = text === "off here" ? `block ${block.key}` : "all blocks", title = `Switch ${pressed ? "on" : "off"} ${name} in ${where}`;
        const button = el("button", { className: "small", textContent: text, title, onclick: () => this.knock(keys, name, !pressed) });
        button.setAttribute("aria-pressed", pressed);
        return button;
      };
      const keys = this.blocks().filter(({ experts }) => experts.includes(name)).map(({ key }) => key);
      return el("div", { className: "line" }, this.swatch(look(name)), el("span", { className: "name", textContent: name }), this.bar(shares[e], look(name).colour), el("span", { className: "value", textContent: percent(shares[e]) }),
        ...(this.source.live ? [toggle("off here", here, [block.key]), toggle("off in all", everywhere, keys)] : []));
    });
    const reset = el("button", { className: "small", textContent: "Switch all on", hidden: !Object.keys(this.state.off).length, onclick: () => { this.state.off = {}; this.refresh(false); } });
    this.at.experts.replaceChildren(el("h2", { textContent: `Experts of block ${block.key}` }), ...lines, reset);
  }

  knock(keys, name, off) {
    const next = structuredClone(this.state.off);
    for (const key of keys) {
      const names = new Set(next[key]);
      if (off) names.add(name); else names.delete(name);
      if (names.size) next[key] = [...names].sort(); else delete next[key];
    }
    this.state.off = next;
    this.refresh(false);
  }

  nextPanel() {
    const columns = this.sides.map(({ spec, routing }, i) => el("div", {}, el("p", { className: "soft", textContent: title(spec) }),
      ...routing.next.map(([text, p]) => {
        const was = i ? this.sides[0].routing.next.find(([other]) => other === text)?.[1] : p;
        const change = was === undefined ? "new" : p - was > 0.001 ? "▲" : was - p > 0.001 ? "▼" : "";
        return el("div", { className: "line" }, el("bdi", { className: "quoted name", textContent: visible(text) }), this.bar(p), el("span", { className: "value", textContent: `${percent(p)}${i ? ` ${change}` : ""}` }));
      })));
    this.at.next.replaceChildren(el("h2", { textContent: "Next token after the prompt" }), ...columns);
  }

  /* Shares of the experts in every block: of the tokens that are shown, or of a task in training. */
  usagePanel() {
    const side = this.sides.find(({ routing }) => routing.blocks.length), usage = this.about.adapters.find(({ name }) => name === side?.spec.adapter)?.usage ?? {};
    this.at.usage.hidden = !side;
    if (!side) return;
    const names = ["", ...Object.keys(usage)];
    if (!names.includes(this.state.usage)) this.state.usage = "";
    const chosen = this.state.usage;
    const select = el("select", { ariaLabel: "Usage of", onchange: () => { this.state.usage = select.value; this.usagePanel(); this.show({}); } },
      ...names.map((name) => el("option", { value: name, textContent: name ? `task ${name}, from the record of training` : "tokens on this page", selected: name === chosen })));
    const rows = side.routing.blocks.map((block, b) => {
      const shares = chosen ? usage[chosen][block.key]?.share ?? [] : side.routing.shares(b);
      const parts = shares.map((share, e) => {
        const part = el("i", { title: `${block.experts[e]} ${percent(share)}` });
        part.style.flexGrow = share;
        part.style.backgroundColor = block.looks[e].colour;
        return part;
      });
      return el("button", { className: "stack", title: `Block ${block.key}`, onclick: () => this.show({ block: b }) }, el("span", { textContent: block.key }), ...parts);
    });
    this.at.usage.replaceChildren(el("h2", { textContent: "Use of experts by block" }), select, ...rows);
  }

  difference() {
    const [one, two] = this.sides;
    const tokens = two ? Math.min(one.routing.prompt, two.routing.prompt) : 0, blocks = Math.min(one?.routing.blocks.length ?? 0, two?.routing.blocks.length ?? 0);
    let count = 0;
    for (let t = 0; t < tokens; t++) for (let b = 0; b < blocks; b++) count += this.differs(two, one, t, b);
    this.at.differs.textContent = tokens * blocks ? `The strongest expert differs in ${count} of ${tokens * blocks} cells of the prompt; they are marked.` : "";
  }
}

function title(spec) {
  const blocks = {}; // by the experts that are off there
  for (const [block, names] of Object.entries(spec.off)) (blocks[names.join(", ")] ??= []).push(block);
  const off = Object.entries(blocks).map(([names, keys]) => `${names} of ${keys.length > 3 ? `${keys.length} blocks` : `block ${keys.join(", ")}`}`);
  return off.length ? `${spec.adapter} without ${off.join("; ")}` : spec.adapter;
}
