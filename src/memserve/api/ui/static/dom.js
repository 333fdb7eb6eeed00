// Elements from tag, attributes and children; and how numbers are written.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "line", "path", "rect", "title"]);

export function h(tag, attributes = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "height_share") element.style.height = `${(100 * value).toFixed(2)}%`;
    else if (name === "left_share") element.style.left = `${(100 * value).toFixed(3)}%`;
    else if (name === "width_share") element.style.width = `${(100 * value).toFixed(3)}%`;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const GROUPED = new Intl.NumberFormat("en");

export function count(value) {
  return GROUPED.format(Math.round(value));
}

export function counted(value, one, several = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : several}`;
}

export function percent(part, whole) {
  return whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–";
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${value.toFixed(value < 10 && at ? 1 : 0)} ${units[at]}`;
}

export function millis(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return `${(value / 1000).toFixed(value < 10000 ? 2 : 1)} s`;
  return `${value.toFixed(value < 10 ? 1 : 0)} ms`;
}

// What an element shows of /metrics: the exact sum of the samples with that name and those labels.
export function sample(metric, value, labels = {}) {
  return { "data-metric": metric, "data-value": value, "data-labels": metric && JSON.stringify(labels) };
}

// A figure; `metric` and `value`: its sample, `under`: attributes of the line below it.
export function figure(label, shown, { metric = null, value = null, sub = null, under = {}, chart = null } = {}) {
  const parts = [h("dt", {}, label), h("dd", sample(metric, value), shown)];
  if (sub) parts.push(h("dd", { class: "sub", ...under }, sub));
  if (chart) parts.push(h("dd", { class: "trend" }, chart));
  return h("dl", { class: "tile" }, ...parts);
}

// Stacked parts of one whole: [class, amount] each.
export function bar(parts, whole, label) {
  const pieces = parts.map(([kind, amount]) => h("i", { class: kind, width_share: whole > 0 ? amount / whole : 0 }));
  return h("div", { class: "bar", role: "img", "aria-label": label }, ...pieces);
}

export function legend(kinds) {
  return h("p", { class: "legend" }, ...kinds.map(([kind, text]) => h("span", {}, h("i", { class: kind }), text)));
}

// A line over time. `points`: [milliseconds, value], the last one now; the right edge is now.
export function spark(points, label, most = null) {
  const x = timeScale(points.map(([at]) => at));
  const top = most ?? Math.max(...points.map(([, value]) => value), 1e-9);
  const y = (value) => (100 - (96 * value) / top).toFixed(2);
  const line = points.map(([at, value], n) => `${n ? "L" : "M"}${x(at)} ${y(value)}`).join("");
  const under = points.length ? `${line}L1000 100L${x(points[0][0])} 100Z` : "";
  return plot("spark", label, h("path", { class: "under", d: under }), h("path", { class: "line", d: line }));
}

// Layers that lie on each other. `points`: [milliseconds, [amount of each layer]]; `kinds`: the layers' classes.
export function layers(points, kinds, whole, label) {
  const x = timeScale(points.map(([at]) => at));
  const y = (value) => (100 - (100 * value) / (whole || 1)).toFixed(2);
  const upTo = (amounts, layer) => amounts.slice(0, layer).reduce((sum, amount) => sum + amount, 0);
  const edge = (layer) => points.map(([at, amounts]) => `${x(at)} ${y(upTo(amounts, layer))}`);
  const path = (_, layer) => `M${[...edge(layer + 1), ...edge(layer).reverse()].join("L")}Z`;
  const shapes = kinds.map((kind, layer) => h("path", { class: kind, d: points.length ? path(kind, layer) : "" }));
  return plot("area", label, ...shapes);
}

// Bars side by side. `amounts`: [text, amount] each.
export function bars(amounts, label) {
  const most = Math.max(...amounts.map(([, amount]) => amount), 1);
  const columns = amounts.map(([text, amount]) => {
    const fill = h("i", { height_share: amount / most });
    return h("span", { class: "column", title: `${text}: ${count(amount)}` }, fill, h("small", {}, text));
  });
  return h("div", { class: "columns", role: "img", "aria-label": label }, ...columns);
}

const WINDOW_MS = 60000;

function timeScale(times) {
  const now = times[times.length - 1] ?? 0;
  const span = Math.max(WINDOW_MS, now - (times[0] ?? 0));
  return (at) => (1000 - (1000 * (now - at)) / span).toFixed(1);
}

function plot(kind, label, ...shapes) {
  const box = { class: kind, viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img" };
  return h("svg", { ...box, "aria-label": label }, ...shapes);
}
