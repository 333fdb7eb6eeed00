// The prefixes of the last prompts as trees that can be opened, with the members that hold them.

import { bar, count, counted, h, legend } from "./dom.js";
import { keyHeaders, ofModel } from "./stream.js";

const TREES = ofModel("trees");
const EVERY_MS = 2000;
const TIERS = [
  ["held", "upper tier: HBM, memory of a store"], ["cached", "lower tier alone: DRAM, disks"], ["free", "not held"],
];
const open = new Set();
let found = null;
let failure = null;
let asked_ms = -EVERY_MS;

export function treesView(figures, changed) {
  if (performance.now() - asked_ms >= EVERY_MS) ask(changed);
  if (failure) return [h("p", { class: "note" }, failure)];
  if (!found) return [h("p", { class: "note" }, "Asking the router.")];
  const intro = `Prefixes that the last ${count(found.prompts_max)} prompts share, most used first.`;
  const parts = [h("p", { class: "note" }, intro), legend(TIERS)];
  if (!found.tenants.length) parts.push(h("p", { class: "note" }, "No prompt of a whole block has been placed yet."));
  for (const { tenant, prefixes } of found.tenants) {
    const title = tenant || (found.tenants.length > 1 ? "(no name)" : "");
    const most = Math.max(...prefixes.map((node) => node.uses));
    parts.push(h("section", {}, title && h("h2", {}, title), ...prefixes.map((node) => branch(node, most))));
  }
  return parts;
}

async function ask(changed) {
  asked_ms = performance.now();
  try {
    const response = await fetch(TREES, { headers: keyHeaders(), cache: "no-store" });
    if (!response.ok) throw new Error((await response.json()).error.message);
    [found, failure] = [await response.json(), null];
  } catch (error) {
    failure = `The prefixes could not be read: ${error.message}`;
  }
  changed();
}

// How hot a prefix is, beside the hottest one.
function heat(share) {
  return h("span", { class: "heat", "aria-hidden": "true" }, h("i", { width_share: share }));
}

function branch(node, most) {
  const held = node.holders.map((holder) => {
    const has = `${count(holder.upper_blocks)} in the upper tier, ${count(holder.lower_blocks)} in the lower alone`;
    const text = `${holder.member}: of ${counted(node.blocks, "block")} ${has}`;
    const parts = [["held", holder.upper_blocks], ["cached", holder.lower_blocks]];
    return h("span", { class: "holder", title: text }, holder.member, bar(parts, node.blocks, text));
  });
  const facts = [
    h("code", {}, node.prefix),
    h("span", {}, counted(node.blocks, "block")),
    h("span", { class: "uses" }, heat(node.uses / most), counted(node.uses, "prompt")),
    h("span", {}, `${count(node.used_s_ago)} s ago`),
    h("span", {}, node.children.length ? counted(node.children.length, "branch", "branches") : ""),
  ];
  const holders = h("span", { class: "holders" }, ...(held.length ? held : ["not held"]));
  const leaf = node.children.length ? null : "leaf";
  const top = h("span", { class: "top" }, ...facts);
  const summary = h("summary", { class: leaf, "data-key": `prefix ${node.prefix}` }, top, holders);
  const below = open.has(node.prefix) ? node.children.map((child) => branch(child, most)) : [];
  const children = h("div", { class: "below" }, ...below);
  const details = h("details", { class: "prefix", open: open.has(node.prefix) }, summary, children);
  details.addEventListener("toggle", () => {
    if (details.open) open.add(node.prefix);
    else open.delete(node.prefix);
    const isNew = details.open && !children.childNodes.length;
    if (isNew) children.append(...node.children.map((child) => branch(child, most)));
  });
  return details;
}
