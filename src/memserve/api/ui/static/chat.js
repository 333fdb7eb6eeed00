// A playground: a conversation, and beside each answer its explanation.

import { h } from "./dom.js";
import { story } from "./requests.js";
import { keyHeaders, read, shownModel } from "./stream.js";

const CHATS = new URL("../v1/chat/completions", import.meta.url);
const messages = [];
let view = null;
let stopping = null;

export function chatView(figures) {
  view ??= build();
  view.model = shownModel(figures.now);
  view.isFleet = figures.isFleet();
  return [view.element];
}

function build() {
  const said = h("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: "0" });
  const comes = "Where it ran and why, what came from KV, and where the time went: of the last answer.";
  const beside = h("div", { "aria-live": "polite" }, h("p", { class: "note" }, comes));
  const text = h("textarea", { "aria-label": "Your message", placeholder: "Ask the model; Enter sends" });
  const send = h("button", { class: "primary", type: "submit" }, "Send");
  const forget = () => (messages.splice(0), said.replaceChildren(greeting()), text.focus());
  const clear = h("button", { type: "button", onclick: forget }, "New chat");
  const stop = h("button", { type: "button", disabled: true, onclick: () => stopping?.abort() }, "Stop");
  const form = h("form", { class: "ask" }, text, h("p", { class: "row" }, send, stop, clear));
  const why = h("section", { class: "why" }, h("h2", {}, "Explanation"), beside);
  const element = h("div", { class: "chat" }, h("section", { class: "talk" }, said, form), why);
  const built = { element, model: "", said, beside, text, stop, send };
  said.append(greeting());
  form.addEventListener("submit", (event) => (event.preventDefault(), ask(built)));
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) (event.preventDefault(), ask(built));
  });
  return built;
}

function greeting() {
  const text = "A conversation with the served model. Ask twice to see its KV used again.";
  return h("p", { class: "note greeting" }, text);
}

function busy(built, is) {
  built.stop.disabled = !is;
  built.send.disabled = is;
}

async function ask(built) {
  const content = built.text.value.trim();
  if (!content || stopping) return;
  built.text.value = "";
  messages.push({ role: "user", content });
  const answer = h("p", { class: "said" });
  built.said.querySelector(".greeting")?.remove();
  built.said.append(h("p", { class: "said user" }, content), answer);
  built.said.scrollTop = built.said.scrollHeight;
  stopping = new AbortController();
  busy(built, true);
  try {
    await stream(built, answer);
  } catch (error) {
    if (error.name !== "AbortError") answer.append(h("span", { class: "failed" }, error.message));
  } finally {
    stopping = null;
    busy(built, false);
  }
  messages.push({ role: "assistant", content: answer.textContent });
}

async function stream(built, answer) {
  const own = built.isFleet ? {} : { explain: true }; // servers of others get no field that they do not know
  const body = JSON.stringify({ model: built.model, messages, stream: true, ...own });
  const headers = { "content-type": "application/json", "x-memserve-explain": "1", ...keyHeaders() };
  const response = await fetch(CHATS, { method: "POST", headers, body, signal: stopping.signal });
  if (!response.ok) throw new Error((await response.json()).error?.message ?? `status ${response.status}`);
  const why = JSON.parse(response.headers.get("x-memserve-explain") ?? "null");
  const facts = Object.entries(why ?? {}).map(([fact, value]) => told(fact, value));
  if (why) built.beside.replaceChildren(story({ story: facts }));
  await read(response.body.getReader(), (chunk) => {
    if (chunk.error) throw new Error(chunk.error.message);
    for (const choice of chunk.choices ?? []) answer.append(choice.delta?.content ?? "");
    built.said.scrollTop = built.said.scrollHeight;
    if (chunk.memserve) built.beside.replaceChildren(story(chunk.memserve));
  });
}

function told(fact, value) {
  return { fact, value: typeof value === "object" ? JSON.stringify(value) : value };
}
