// A finished run, played: its snapshots under a slider.

import { h } from "./dom.js";

const RUNS = new URL("runs", import.meta.url);
const SPEEDS = [1, 4, 16, 64, 256];
const FRAME_MS = 100;

async function fetched(url) {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response.json();
}

// Calls onMoment(snapshots, at) for the moment that is shown, onState(text, isBad) for each change.
export async function play(onMoment, onState) {
  try {
    const names = await fetched(RUNS);
    const player = new Player(names, onMoment);
    document.body.append(player.element);
    await player.load(0);
    onState("recorded", false);
  } catch (error) {
    onState(`cannot read the run: ${error.message}`, true);
  }
}

class Player {
  constructor(names, onMoment) {
    [this.onMoment, this.snapshots, this.now_ms, this.timer] = [onMoment, [], 0, 0];
    const toggle = () => (this.timer ? this.stop() : this.start());
    const moved = () => (this.stop(), this.seek(Number(this.slider.value)));
    this.button = h("button", { type: "button", class: "primary", onclick: toggle }, "Play");
    this.slider = h("input", { type: "range", min: 0, value: 0, "aria-label": "Moment of the run", oninput: moved });
    this.output = h("output", {});
    this.speed = h("select", { "aria-label": "Speed" });
    this.speed.append(...SPEEDS.map((speed) => h("option", { value: speed, selected: speed === 16 }, `${speed}x`)));
    const chosen = () => (this.stop(), this.load(Number(this.runs.value)));
    this.runs = h("select", { "aria-label": "Run", onchange: chosen });
    this.runs.append(...names.map((name, at) => h("option", { value: at }, name)));
    const parts = [this.button, this.speed, this.slider, this.output, names.length > 1 && this.runs];
    this.element = h("section", { class: "player", "aria-label": "Time of the run" }, ...parts);
  }

  async load(number) {
    this.snapshots = await fetched(`${RUNS}/${number}`);
    this.slider.max = this.snapshots.length - 1;
    this.seek(0);
  }

  seek(at) {
    const first_ms = this.snapshots[0].time_ms;
    this.slider.value = at;
    this.now_ms = this.snapshots[at].time_ms;
    const seconds = (ms) => `${((ms - first_ms) / 1000).toFixed(1)} s`;
    const text = `${seconds(this.now_ms)} of ${seconds(this.snapshots[this.snapshots.length - 1].time_ms)}`;
    this.output.textContent = text;
    this.slider.setAttribute("aria-valuetext", text);
    this.onMoment(this.snapshots, at);
  }

  start() {
    if (Number(this.slider.value) === this.snapshots.length - 1) this.seek(0);
    this.button.textContent = "Pause";
    this.timer = setInterval(() => this.advance(), FRAME_MS);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = 0;
    this.button.textContent = "Play";
  }

  advance() {
    const at = Number(this.slider.value);
    const until_ms = this.now_ms + FRAME_MS * Number(this.speed.value);
    let next = at;
    while (next + 1 < this.snapshots.length && this.snapshots[next + 1].time_ms <= until_ms) next += 1;
    if (next !== at) this.seek(next);
    this.now_ms = until_ms;
    if (next === this.snapshots.length - 1) this.stop();
  }
}
