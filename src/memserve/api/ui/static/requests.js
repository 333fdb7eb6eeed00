// Requests as timelines, with what was decided for them and why.

import { bar, count, h, legend, millis } from "./dom.js";

const STAGES = [
  ["read", "read and tokenized"], ["queue", "queue"], ["prefill", "prefill, handover"], ["decode", "decode"],
];
const open = new Set(); // ids of requests whose story is shown

export function requestsView(figures) {
  const { live, recent } = figures.now;
  const longest = Math.max(1, ...[...live, ...recent].map((entry) => entry.total_ms));
  const list = (title, entries, none) =>
    h("section", {}, h("h2", {}, `${title} (${entries.length})`),
      ...(entries.length ? entries.map((entry) => shown(entry, longest)) : [h("p", { class: "note" }, none)]));
  return [
    legend(STAGES),
    list("In flight", live, "No request is being answered now."),
    list("Ended lately", recent, "No request has ended yet."),
  ];
}

function shown(entry, longest) {
  const key = entry.response_id ?? entry.request_id;
  const has = entry.prompt_tokens !== undefined;
  const failed = entry.status !== null && entry.status !== 200;
  const ended = failed ? `status ${entry.status}` : entry.finish_reason;
  const state = entry.status === null ? "running" : ended;
  const facts = [
    h("code", { title: key }, key),
    h("span", { class: failed ? "failed" : entry.status === null ? "running" : null }, state ?? "reading"),
    h("span", { class: "at" }, (entry.instances ?? []).join(" \u2192 ")),
    h("span", { class: "tokens" }, has && tokens(entry)),
  ];
  const top = h("span", { class: "top" }, ...facts);
  const summary = h("summary", { "data-key": `request ${key}` }, top, timeline(entry, longest),
    h("span", { class: "time" }, millis(entry.total_ms)));
  const toggled = (event) => (event.target.open ? open.add(key) : open.delete(key));
  return h("details", { open: open.has(key), ontoggle: toggled }, summary, story(entry));
}

function tokens(entry) {
  const prompt = `${count(entry.prompt_tokens)} in`;
  const cached = entry.cached_tokens ? ` (${count(entry.cached_tokens)} from KV)` : "";
  return `${prompt}${cached}${entry.output_tokens === undefined ? "" : `, ${count(entry.output_tokens)} out`}`;
}

function timeline(entry, longest) {
  const stages = entry.stages ?? [{ stage: "waiting", from_ms: 0, to_ms: entry.total_ms }];
  const parts = stages.map(({ stage, from_ms, to_ms }) => [stage, Math.max(0, to_ms - from_ms)]);
  const text = stages.map(({ stage, from_ms, to_ms }) => `${stage} ${millis(to_ms - from_ms)}`).join(", ");
  return bar(parts, longest, text);
}

export function story(entry) {
  const rows = (entry.stages ?? []).map(({ stage, from_ms, to_ms }) => [stage, millis(to_ms - from_ms)]);
  if (entry.ttft_ms !== undefined && entry.ttft_ms !== null) rows.push(["first token after", millis(entry.ttft_ms)]);
  if (entry.computed_tokens !== undefined) rows.push(["prompt tokens computed", count(entry.computed_tokens)]);
  if (entry.request_id) rows.push(["request id", entry.request_id]);
  if (entry.tenant) rows.push(["tenant", entry.tenant]);
  for (const { fact, value } of entry.story ?? []) rows.push([fact.replaceAll("_", " "), String(value)]);
  const pairs = rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]);
  return h("dl", { class: "story" }, ...pairs);
}
