// The cluster as a picture: router, instances, stores; their tiers; what moves between them now.

import { bar, bytes, count, counted, figure, h, layers, legend, percent, sample, spark } from "./dom.js";

const RANKS = [["prefill", "colocated", "decode", "engine"], ["store"]];
const STATES = [["held", "held by requests"], ["cached", "cached prefixes"], ["free", "free"]];

export function clusterView(figures) {
  if (!figures.now.viewer.sees_cluster) {
    return [h("p", { class: "note" }, "The cluster's figures need the key of /metrics. View 3 has your requests.")];
  }
  const picture = drawn(figures);
  const cluster = h("section", {}, h("h2", {}, "Cluster"), picture);
  return [h("section", {}, totals(figures)), cluster, tierSection(figures)].filter(Boolean);
}

// Lines from the router to each member; only after the layout is their place known.
export function connect(root) {
  const picture = root.querySelector(".picture");
  const links = picture?.querySelector("svg.links");
  const router = picture?.querySelector("[data-node=router]");
  if (!links || !router) return;
  const frame = picture.getBoundingClientRect();
  const from = router.getBoundingClientRect();
  links.replaceChildren();
  for (const card of picture.querySelectorAll("[data-node=member]")) {
    const to = card.getBoundingClientRect();
    links.append(
      h("line", {
        class: card.dataset.busy === "yes" ? "busy" : null,
        x1: from.left + from.width / 2 - frame.left,
        y1: from.bottom - frame.top,
        x2: to.left + to.width / 2 - frame.left,
        y2: to.top - frame.top,
      }),
    );
  }
}

function totals(figures) {
  const clustered = figures.has("memserve_router_requests_live");
  const alone = figures.isFleet() ? "memserve_fleet_engine_waiting" : "memserve_requests_waiting";
  const waiting = clustered ? "memserve_admission_waiting" : alone;
  const generated = "memserve_generated_tokens_total";
  const [prompts, cached] = figures.promptNames();
  const tile = (label, name, more = {}) => {
    const value = figures.sum(name);
    return figure(label, count(value), { metric: name, value, ...more });
  };
  const speed = (label, name) => {
    const chart = spark(figures.rates(name), `${label}, the last minutes`);
    const total = figures.sum(name);
    const below = { sub: `${count(total)} in all`, under: sample(name, total), chart };
    return figure(label, count(figures.rate(name)), below);
  };
  const inFlight = figures.history.map((point) => [point.time_ms, point.live]);
  const hits = { sub: "of answered requests' prompt tokens, since the server's start", metric: cached, value: figures.sum(cached) };
  const trend = spark(figures.shares(cached, prompts), "KV from the cache, the last minutes", 1);
  const sub = `${count(figures.sum(waiting))} wait${clustered ? " for admission" : " in engines"}`;
  const under = sample(waiting, figures.sum(waiting));
  const moments = { sub, under, chart: spark(inFlight, "Requests in flight, the last minutes") };
  const connections = "memserve_http_connections";
  const resident = bytes(figures.sum("memserve_resident_bytes"));
  return h(
    "div",
    { class: "tiles" },
    tile("Requests in flight", figures.live(), moments),
    !figures.isFleet() && speed("Generated tokens/s", generated),
    speed("Prompt tokens/s", prompts),
    figure("KV from the cache", percent(figures.sum(cached), figures.sum(prompts)), { ...hits, chart: trend }),
    figures.has(connections) && tile("HTTP connections", connections, { sub: `the server: ${resident} resident` }),
  );
}

function drawn(figures) {
  const members = figures.now.members.length
    ? figures.now.members
    : [{ name: "engine", role: "engine", state: figures.sum("memserve_engine_up") ? "live" : "down" }];
  const clustered = figures.now.members.length > 0;
  const ofRole = (role) => members.filter((member) => member.role === role);
  const ranks = RANKS.map((roles) => roles.flatMap(ofRole))
    .filter((rank) => rank.length)
    .map((rank) => h("div", { class: "rank" }, ...rank.map((member) => card(figures, member, clustered))));
  const links = h("svg", { class: "links", "aria-hidden": "true" });
  return h("div", { class: "picture" }, links, routerCard(figures), ...ranks);
}

function routerCard(figures) {
  const decided = figures.rows("memserve_router_decisions_total");
  const ways = decided.map(([labels, value]) => `${labels.way} ${count(value)}`).join(", ");
  const isRouter = figures.has("memserve_router_instances") || figures.now.members.length > 0;
  const title = isRouter ? "router" : "server";
  const about = figures.isFleet() ? "before servers of other projects" : null;
  const name = h("h3", {}, title, about && h("span", { class: "role" }, ` ${about}`));
  const parts = [name, ways && h("p", { class: "facts" }, `KV of prompts: ${ways}`)];
  if (figures.has("memserve_router_tree_blocks")) {
    parts.push(h("p", { class: "facts" }, `knows ${count(figures.sum("memserve_router_tree_blocks"))} cached blocks`));
  }
  return h("div", { class: "rank" }, h("article", { class: "card", "data-node": "router" }, ...parts));
}

// A server of another project: what it says of itself, and what the router believes that it has cached.
function engineCard(figures, member) {
  const engine = { engine: member.name };
  const fact = (metric, text) => {
    const value = figures.sum(metric, engine);
    if (!value && !metric.endsWith("_open")) return null;
    return h("p", { class: "facts", ...sample(metric, value, engine) }, text(value));
  };
  const open = figures.sum("memserve_fleet_requests_open", engine);
  const prompts = figures.sum("memserve_fleet_prompt_tokens_total", engine);
  const usage = figures.sum("memserve_fleet_engine_kv_usage", engine);
  const shown = `KV memory: ${percent(usage, 1)} in use`;
  const parts = [
    h("h3", {}, h("span", { class: `dot ${member.state}`, title: member.state }), ` ${member.name} `,
      h("span", { class: "role" }, member.state === "live" ? "engine" : "engine, takes no requests")),
    fact("memserve_fleet_requests_open", (value) => `${count(value)} open here`),
    fact("memserve_fleet_engine_running", (value) => `${count(value)} running by its own count`),
    fact("memserve_fleet_engine_waiting", (value) => `${count(value)} waiting by its own count`),
    fact("memserve_fleet_requests_total", (value) => `${counted(value, "attempt")} sent`),
    fact("memserve_fleet_requests_failed_total", (value) => `${count(value)} of them failed`),
    fact("memserve_fleet_matched_tokens_total",
      (value) => `${percent(value, prompts)} of ${count(prompts)} prompt tokens believed cached`),
    fact("memserve_fleet_cached_blocks", (value) => `${count(value)} blocks believed cached`),
    h("p", { class: "facts" }, shown), bar([["held", usage]], 1, shown),
  ];
  const busy = open ? "yes" : "no";
  return h("article", { class: "card", "data-node": "member", "data-name": member.name, "data-busy": busy }, ...parts);
}

function card(figures, member, clustered) {
  if (figures.isFleet()) return engineCard(figures, member);
  const mine = (name) => figures.sum(`memserve_instance_${name}`, { instance: member.name });
  const running = clustered ? mine("sequences_running") : figures.sum("memserve_sequences_running");
  const waiting = clustered ? mine("requests_waiting") : figures.sum("memserve_requests_waiting");
  const received = figures.rate(`received ${member.name}`);
  const facts = [];
  if (clustered && mine("transfers_open")) facts.push(`${counted(mine("transfers_open"), "KV transfer")} open`);
  if (clustered && mine("prompt_tokens_total")) {
    const [cached, begun] = [count(mine("cached_tokens_total")), count(mine("prompt_tokens_total"))];
    facts.push(`began ${begun} prompt tokens, ${cached} with KV from its cache; documents and retries as well`);
  }
  const tiers = member.role === "store" ? storeBars(figures, member.name) : blockBars(figures, member.name);
  const name = h("h3", {}, h("span", { class: `dot ${member.state}`, title: member.state }), ` ${member.name} `);
  name.append(h("span", { class: "role" }, member.state === "live" ? member.role : `${member.role}, ${member.state}`));
  const attributes = { class: "card", "data-node": "member", "data-name": member.name };
  return h(
    "article",
    { ...attributes, "data-busy": running || waiting || received > 0 ? "yes" : "no" },
    name,
    received > 0 && h("p", { class: "flow", title: "from other members" }, `KV in ${bytes(received)}/s`),
    member.role !== "store" && h("p", { class: "facts" }, ...load(figures, member.name, clustered)),
    ...facts.map((fact) => h("p", { class: "facts" }, fact)),
    ...tiers,
  );
}

function load(figures, instance, clustered) {
  const part = (names, text) => {
    const [name, labels] = clustered ? [names[0], { instance }] : [names[1], {}];
    const value = figures.sum(name, labels);
    return h("span", sample(name, value, labels), `${count(value)} ${text}`);
  };
  const running = ["memserve_instance_sequences_running", "memserve_sequences_running"];
  const waiting = ["memserve_instance_requests_waiting", "memserve_requests_waiting"];
  return [part(running, "running"), ", ", part(waiting, "waiting")];
}

function blockBars(figures, name) {
  return Object.entries(figures.tiers(name)).flatMap(([tier, { held, cached, free }]) => {
    const whole = held + cached + free;
    if (!whole) return [];
    const text = `${tier.toUpperCase()}: ${count(held + cached)} of ${count(whole)} blocks`;
    return [h("p", { class: "facts" }, text), bar([["held", held], ["cached", cached]], whole, text)];
  });
}

function storeBars(figures, store) {
  const mine = (name) => figures.sum(`memserve_store_${name}`, { store });
  const parts = [];
  const [memory, used] = [mine("memory_bytes"), mine("memory_used_bytes")];
  if (memory) {
    const text = `Memory: ${bytes(used)} of ${bytes(memory)}`;
    parts.push(h("p", { class: "facts" }, text), bar([["cached", used]], memory, text));
  }
  const asked = mine("kv_blocks_asked_total");
  if (asked) {
    const part = (100 * mine("kv_blocks_lent_total")) / asked;
    parts.push(h("p", { class: "facts" }, `${part.toFixed(1)} % of ${counted(asked, "block")} asked for were given`));
  }
  const given = mine("kv_blocks_moved_total");
  if (given) parts.push(h("p", { class: "facts" }, `${counted(given, "block")} given to other stores`));
  const disks = mine("disks");
  if (disks) {
    const kept = `${count(mine("disk_values"))} values in ${bytes(mine("disk_bytes"))}`;
    parts.push(h("p", { class: "facts" }, `${count(disks)} disks: ${kept}`));
  }
  return parts;
}

function tierSection(figures) {
  const charts = Object.entries(figures.tiers()).flatMap(([tier, { held, cached, free }]) => {
    const whole = held + cached + free;
    if (!whole) return [];
    const none = { held: 0, cached: 0 };
    const at = (point) => point.tiers[tier] ?? none;
    const points = figures.history.map((point) => [point.time_ms, [at(point).held, at(point).cached]]);
    const text = `${count(held)} held, ${count(cached)} cached, ${count(free)} free`;
    const name = figures.blocksName();
    const shown = (amount, state, word = state) =>
      h("span", sample(name, amount, { tier, state }), `${count(amount)} ${word}`);
    const words = [shown(held, "used", "held"), ", ", shown(cached, "cached"), ", ", shown(free, "free")];
    const chart = layers(points, ["held", "cached"], whole, `Blocks of ${tier} in use, the last minutes: ${text}`);
    return [
      h("article", { class: "card chart" },
        h("h3", {}, tier.toUpperCase(), h("span", { class: "role" }, " ", ...words, ` of ${count(whole)} blocks`)),
        chart),
    ];
  });
  if (!charts.length) return null;
  const title = h("h2", {}, "Tiers of all instances, the last minutes");
  return h("section", {}, title, legend(STATES), h("div", { class: "charts" }, ...charts));
}
