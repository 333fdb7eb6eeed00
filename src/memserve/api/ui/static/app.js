// The page: which view is open, and what it shows of each snapshot.

import { cacheView } from "./cache.js";
import { chatView } from "./chat.js";
import { clusterView, connect } from "./cluster.js";
import { h } from "./dom.js";
import { Figures, HISTORY } from "./figures.js";
import { play } from "./player.js";
import { requestsView } from "./requests.js";
import { follow, shownModel } from "./stream.js";
import { treesView } from "./trees.js";

const VIEWS = { cluster: clusterView, cache: cacheView, requests: requestsView, trees: treesView, chat: chatView };
const figures = new Figures();
const main = document.getElementById("view");
const state = document.getElementById("state");
const keys = document.getElementById("keys");

function openView() {
  const name = location.hash.slice(1);
  return name in VIEWS ? name : "cluster";
}

function render() {
  const name = openView();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!figures.now || document.hidden) return;
  const parts = VIEWS[name](figures, render);
  if (parts.length === main.childNodes.length && parts.every((part, at) => part === main.childNodes[at])) return;
  const focused = document.activeElement?.dataset?.key;
  main.replaceChildren(...parts);
  if (focused) main.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  if (name === "cluster") connect(main);
}

function follows(snapshot) {
  if (snapshot.history) figures.begin(snapshot.history);
  take(snapshot);
  figures.thin();
}

function take(snapshot) {
  figures.take(snapshot);
  showModel(snapshot);
  render();
}

// Its name; where the server has several models, their names to choose from.
function showModel(snapshot) {
  const { models = [], version } = snapshot;
  const model = shownModel(snapshot);
  const place = document.getElementById("model");
  const list = models.join("\n");
  if (place.dataset.shown === `${model}\n${list}`) return;
  place.dataset.shown = `${model}\n${list}`;
  const choose = (event) => (location.search = new URLSearchParams({ model: event.target.value }));
  const options = models.map((name) => h("option", { value: name, selected: name === model }, name));
  const shown = models.length > 1 ? h("select", { "aria-label": "Model", onchange: choose }, ...options) : model;
  place.replaceChildren(shown, `, memserve ${version}`);
}

// A moment of a finished run: what went before it is its history.
function show(snapshots, at) {
  figures.history = [];
  for (const earlier of snapshots.slice(Math.max(0, at - HISTORY + 1), at)) figures.take(earlier);
  take(snapshots[at]);
}

function told(text, isBad, needsKey) {
  state.textContent = text;
  state.classList.toggle("bad", isBad);
  if (!needsKey) return;
  figures.now = null;
  main.replaceChildren(h("p", { class: "note" }, "This server asks for a key: the button above takes it."));
  if (!keys.open) keys.showModal();
}

function theme(next) {
  document.documentElement.dataset.theme = next;
}

const dark = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
theme(localStorage.getItem("memserve-theme") ?? dark);
document.getElementById("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("memserve-theme", next);
  theme(next);
});
document.getElementById("key").addEventListener("click", () => keys.showModal());
keys.addEventListener("close", () => {
  const input = document.getElementById("key-text");
  if (keys.returnValue === "use") {
    sessionStorage.setItem("memserve-key", input.value.trim());
    dispatchEvent(new Event("memserve-key"));
  }
  input.value = "";
});
addEventListener("hashchange", render);
addEventListener("resize", () => connect(main));
document.addEventListener("visibilitychange", render);
document.addEventListener("keydown", (event) => {
  const typing = ["INPUT", "TEXTAREA"].includes(event.target.tagName);
  const name = Object.keys(VIEWS)[Number(event.key) - 1];
  if (!typing && !event.ctrlKey && !event.metaKey && !event.altKey && name) location.hash = name;
});
if ("recorded" in document.documentElement.dataset) {
  for (const name of ["trees", "chat"]) {
    delete VIEWS[name]; // nothing of them is recorded
    document.querySelector(`nav a[href="#${name}"]`).remove();
  }
  document.getElementById("key").remove();
  play(show, told);
} else {
  follow(follows, told);
}
render();
