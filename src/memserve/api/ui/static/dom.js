// Elements from tag, attributes and children; and how numbers are written.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "line", "path", "title"]);

export function h(tag, attributes = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
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
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return `${value.toFixed(value < 10 ? 1 : 0)} ms`;
}

// A figure as it stands in /metrics: `data-metric` and `data-value` carry the sample's name and exact value.
export function figure(label, shown, { metric = null, value = null, sub = null } = {}) {
  const parts = [h("dt", {}, label), h("dd", { "data-metric": metric, "data-value": value }, shown)];
  return h("dl", { class: "tile" }, ...parts, sub && h("dd", { class: "sub" }, sub));
}

// Stacked parts of one whole: [class, amount] each.
export function bar(parts, whole, label) {
  const pieces = parts.map(([kind, amount]) => h("i", { class: kind, width_share: whole > 0 ? amount / whole : 0 }));
  return h("div", { class: "bar", role: "img", "aria-label": label }, ...pieces);
}

export function legend(kinds) {
  return h("p", { class: "legend" }, ...kinds.map(([kind, text]) => h("span", {}, h("i", { class: kind }), text)));
}

export function spark(points, most, label) {
  const width = Math.max(points.length - 1, 1);
  const place = (value, at) => `${at ? "L" : "M"}${at} ${(100 - (100 * value) / (most || 1)).toFixed(2)}`;
  const box = { class: "spark", viewBox: `0 -2 ${width} 104`, preserveAspectRatio: "none", role: "img" };
  return h("svg", { ...box, "aria-label": label }, h("path", { d: points.map(place).join("") }));
}
