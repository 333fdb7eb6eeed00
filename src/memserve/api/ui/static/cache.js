// Hit rate with its denominator and its ceiling, latencies, objectives, tenants.

import { bars, count, figure, h, millis, percent, sample, spark } from "./dom.js";

const WINDOW_S = 60;
const FRESH = "memserve_router_new_prompt_tokens_total";

export function cacheView(figures) {
  const parts = [];
  if (figures.isFleet()) return figures.now.viewer.sees_cluster ? [hits(figures)] : [unseen()];
  if (figures.now.viewer.sees_cluster) parts.push(hits(figures), latencies(figures));
  if (figures.now.viewer.sees_cluster && !isRecorded()) parts.push(objectives(figures));
  if (!isRecorded()) parts.push(tenants(figures));
  return parts;
}

function unseen() {
  return h("p", { class: "note" }, "These figures need the key of /metrics.");
}

function isRecorded() {
  return "recorded" in document.documentElement.dataset; // by tenant and by objective nothing is
}

function hits(figures) {
  const [promptName, cachedName] = figures.promptNames();
  const [cached, prompts] = [figures.sum(cachedName), figures.sum(promptName)];
  const [lately, all] = [figures.grown(cachedName, WINDOW_S), figures.grown(promptName, WINDOW_S)];
  const tiles = [
    figure("Hit rate since the start", percent(cached, prompts), {
      chart: reached(figures, prompts ? cached / prompts : 0),
      metric: cachedName, value: cached, under: sample(promptName, prompts),
      sub: `${count(cached)} of ${count(prompts)} prompt tokens`,
    }),
    figure("Hit rate of the last minute", percent(lately.grown, all.grown), {
      sub: `${count(lately.grown)} of ${count(all.grown)} prompt tokens in ${all.seconds.toFixed(0)} s`,
      chart: spark(figures.shares(cachedName, promptName), "Hit rate, the last minutes", 1),
    }),
    ...ceiling(figures),
  ];
  return h("section", {}, h("h2", {}, "KV from the cache"), h("div", { class: "tiles wide" }, ...tiles));
}

// The hit rate as a bar, with a mark at what an unlimited cache would have reached.
function reached(figures, share) {
  const [all, fresh] = [figures.sum("memserve_router_seen_prompt_tokens_total"), figures.sum(FRESH)];
  const most = all > 0 ? Math.max(0, 1 - fresh / all) : null;
  const mark = most !== null && h("i", { class: "mark", left_share: most, title: "attainable" });
  return h("div", { class: "gauge", "aria-hidden": "true" }, h("i", { class: "cached", width_share: share }), mark);
}

function ceiling(figures) {
  const [all, fresh] = ["memserve_router_seen_prompt_tokens_total", FRESH];
  if (!figures.has(all)) return [];
  const [tokens, first] = [figures.sum(all), figures.sum(fresh)];
  const share = tokens ? Math.max(0, 1 - first / tokens) : 0;
  return [
    figure("Attainable: an unlimited cache", percent(Math.max(0, tokens - first), tokens), {
      metric: fresh, value: first,
      under: sample(all, tokens),
      sub: `about ${count(first)} of ${count(tokens)} prompt tokens were new, those in flight included`,
      chart: h("div", { class: "gauge", "aria-hidden": "true" }, h("i", { class: "held", width_share: share })),
    }),
  ];
}

function latencies(figures) {
  const named = [
    ["Time to the first token", "memserve_time_to_first_token_seconds"],
    ["Between two tokens", "memserve_inter_token_seconds"],
  ];
  const tiles = named.map(([label, name]) => {
    const at = (q) => millis(figures.has(`${name}_bucket`) ? scaled(figures.quantile(name, q)) : null);
    const seen = figures.sum(`${name}_count`);
    const sub = `p95 ${at(0.95)}, p99 ${at(0.99)}; ${count(seen)} observed, each bar up to its figure`;
    const chart = bars(figures.buckets(name).map(([until, amount]) => [upTo(until), amount]), `${label}: its spread`);
    return figure(`${label}, median`, at(0.5), { metric: `${name}_count`, value: seen, sub, chart });
  });
  const title = isRecorded() ? "Latency as clients saw it" : "Latency at the HTTP edge";
  return h("section", {}, h("h2", {}, title), h("div", { class: "tiles wide" }, ...tiles));
}

function upTo(seconds) {
  if (seconds === Infinity) return "more";
  return seconds < 1 ? `${Number((1000 * seconds).toPrecision(3))} ms` : `${seconds} s`;
}

function scaled(seconds) {
  return seconds === null ? null : seconds * 1000;
}

function objectives(figures) {
  const clustered = figures.has("memserve_instance_objectives_total");
  const name = clustered ? "memserve_instance_objectives_total" : "memserve_objectives_total";
  const tiles = ["ttft", "tpot"].flatMap((objective) => {
    const met = figures.sum(name, { objective, result: "met" });
    const all = met + figures.sum(name, { objective, result: "missed" });
    if (!all) return [];
    const under = sample(name, met, { objective, result: "met" });
    const kept = `${count(met)} of ${count(all)}`;
    return [figure(`${objective.toUpperCase()} kept`, percent(met, all), { sub: kept, under })];
  });
  const how = "None: --scheduling slo with --slo-ttft-ms and --slo-tpot-ms sets objectives.";
  const none = h("p", { class: "note" }, how);
  return h("section", {}, h("h2", {}, "Objectives"), tiles.length ? h("div", { class: "tiles" }, ...tiles) : none);
}

function tenants(figures) {
  const tokens = [["Prompt tokens", "prompt_tokens"], ["Generated tokens", "generated_tokens"]];
  const columns = [["Requests", "requests"], ...tokens];
  const rowsOf = figures.rows("memserve_tenant_requests_total");
  const names = [...new Set(rowsOf.map(([labels]) => labels.tenant))].sort();
  const cell = (tenant, column) => {
    const name = `memserve_tenant_${column}_total`;
    const value = figures.sum(name, { tenant });
    return h("td", sample(name, value, { tenant }), count(value));
  };
  const titles = ["Tenant", ...columns.map(([text]) => text)];
  const head = h("tr", {}, ...titles.map((text) => h("th", { scope: "col" }, text)));
  const rows = names.map((tenant) =>
    h("tr", {}, h("td", {}, tenant || "(no name)"), ...columns.map(([, column]) => cell(tenant, column))),
  );
  if (figures.has("memserve_tenant_seen_prompt_tokens_total")) {
    head.append(h("th", { scope: "col" }, "Attainable hit rate"));
    names.forEach((tenant, at) => rows[at].append(attainable(figures, tenant)));
  }
  const table = h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows));
  const shown = rows.length ? h("div", { class: "scroll" }, table) : h("p", { class: "note" }, "No request yet.");
  return h("section", {}, h("h2", {}, "Tenants"), shown);
}

function attainable(figures, tenant) {
  const name = "memserve_tenant_new_prompt_tokens_total";
  const tokens = figures.sum("memserve_tenant_seen_prompt_tokens_total", { tenant });
  const first = figures.sum(name, { tenant });
  const shown = percent(Math.max(0, tokens - first), tokens);
  return h("td", sample(name, first, { tenant }), shown);
}
