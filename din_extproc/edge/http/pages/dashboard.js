// Shows what /dashboard/events says. Names come from nodes and files: they go into the page as text only, never as markup.
"use strict";

const TABLE_UP_TO = 40; // nodes of a pool that are rows; of more, each is a tile and those that need a look are rows
const WORST = 10;
const KEY = "din-dashboard-key";
const THEMES = ["system", "light", "dark"];
const $ = (id) => document.getElementById(id);
const state = { board: null, nodes: new Map(), find: "" };
const cells = new Map(); // tile or row by pool and node, reused from turn to turn so that focus stays

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "text") made.textContent = value;
    else if (value !== undefined && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function fill(parent, children) {
  children.forEach((child, at) => {
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] || null);
  });
  while (parent.children.length > children.length) parent.lastElementChild.remove();
}

const count = (n) => (n >= 1e6 ? (n / 1e6).toFixed(1) + " M" : n >= 1e4 ? (n / 1e3).toFixed(0) + " k" : String(n));
const ms = (n) => (n === undefined || n === null ? "" : n >= 10000 ? (n / 1000).toFixed(0) + " s" : n + " ms");
const percent = (share) => Math.round(share * 100) + " %";
const clock = (at) => new Date(at * 1000).toTimeString().slice(0, 8);
const latest = (ttft) => (ttft || []).filter((point) => point !== null).at(-1);

// What a node's state and breaker come to: a glyph and words beside the colour, and how much it needs a look.
function verdict(node) {
  const breaker = node.breaker || {};
  const words = [node.state];
  let [glyph, tone, rank] = { ready: ["", "good", 0], loading: ["…", "idle", 3], draining: ["↓", "idle", 2] }[node.state] || ["×", "bad", 6];
  if (node.state === "quarantined") glyph = "!";
  if (breaker.state === "open") [glyph, tone, rank] = ["⊘", "bad", Math.max(rank, 5)];
  else if (breaker.state === "half_open") [glyph, tone, rank] = ["½", "warn", Math.max(rank, 4)];
  else if (breaker.state === "ramping") [glyph, tone, rank] = ["↗", "warn", Math.max(rank, 3)];
  if (breaker.state && breaker.state !== "closed") {
    words.push("breaker " + breaker.state.replace("_", " ") + (breaker.share !== undefined && breaker.share < 1 ? ", gets " + percent(breaker.share) : ""));
  }
  if (!rank && node.trust < 0.5) [glyph, tone, rank] = ["?", "warn", 2];
  if (!rank && node.silence_s) [glyph, tone, rank] = ["~", "warn", 1];
  return { glyph: glyph || "✓", mark: glyph, tone, rank, words: words.join(", ") };
}

const load = (node) => (node.running === undefined ? 0 : Math.min(1, node.running / node.slots));
const matches = (node, pool) => {
  const text = [node.id, pool, node.model, node.state, node.breaker ? node.breaker.state : "", node.version, node.dtype].join(" ").toLowerCase();
  return state.find.split(/\s+/).every((word) => text.includes(word));
};

function bar(share, full = share >= 0.9) {
  const made = el("span", { class: "bar", "aria-hidden": "true" }, el("i"));
  made.firstChild.style.width = Math.round(Math.min(1, share) * 100) + "%";
  if (full) made.dataset.full = "";
  return made;
}

function spark(points) {
  const known = points.filter((point) => point !== null);
  if (!known.length) return "";
  const top = Math.max(...known, 1);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", "0 0 84 18");
  svg.setAttribute("aria-hidden", "true");
  const x = (at) => (83 - (points.length - 1 - at) * 2.8).toFixed(1);
  const y = (point) => (17 - (point / top) * 16).toFixed(1);
  let run = [];
  const draw = () => {
    if (run.length > 1) {
      const line = document.createElementNS(svg.namespaceURI, "polyline");
      line.setAttribute("points", run.join(" "));
      svg.append(line);
    } else if (run.length) {
      const dot = document.createElementNS(svg.namespaceURI, "circle");
      const [cx, cy] = run[0].split(",");
      for (const [name, value] of [["cx", cx], ["cy", cy], ["r", 1.5]]) dot.setAttribute(name, value);
      svg.append(dot);
    }
    run = [];
  };
  points.forEach((point, at) => (point === null ? draw() : run.push(x(at) + "," + y(point))));
  draw();
  return svg;
}

function stateCell(node) {
  const seen = verdict(node);
  return el("span", { class: "state", "data-tone": seen.tone, "data-glyph": seen.glyph, text: seen.words });
}

// One cell of the page for one node in one pool, made once.
function cell(kind, pool, node, make) {
  const name = kind + "\0" + pool + "\0" + node.id;
  let made = cells.get(name);
  if (!made) cells.set(name, (made = { root: make(), shown: null }));
  made.used = true;
  return made;
}

function row(pool, node) {
  const made = cell("row", pool, node, () => {
    const button = el("button", { type: "button", text: node.id });
    button.addEventListener("click", () => open(node.id));
    const root = el("tr", {}, el("td", {}, button));
    for (let at = 0; at < 6; at++) root.append(el("td"));
    return root;
  });
  if (made.shown !== node) {
    made.shown = node;
    const [, seen, work, kv, trust, pace, why] = made.root.children;
    seen.replaceChildren(stateCell(node));
    const running = node.running === undefined ? "" : node.running + (node.waiting ? " + " + node.waiting : "") + " / " + node.slots;
    work.replaceChildren(...(running ? [bar(load(node)), running] : []));
    kv.replaceChildren(...(node.kv === undefined ? [] : [bar(node.kv), percent(node.kv)]));
    trust.replaceChildren(bar(node.trust, node.trust < 0.5), node.trust.toFixed(2));
    pace.replaceChildren(spark(node.ttft || []), ms(latest(node.ttft)));
    why.className = "wrap";
    why.textContent = (node.silence_s ? "silent for " + node.silence_s + " s. " : "") + (verdict(node).rank ? (node.breaker && node.breaker.reason) || node.reason || "" : "");
  }
  return made.root;
}

function tile(pool, node) {
  const made = cell("tile", pool, node, () => {
    const root = el("button", { type: "button", class: "tile", tabindex: "-1" }, el("i"), el("b"));
    root.addEventListener("click", () => open(node.id));
    return root;
  });
  if (made.shown !== node) {
    made.shown = node;
    const seen = verdict(node);
    made.root.dataset.tone = seen.tone;
    made.root.firstChild.style.height = Math.round(load(node) * 100) + "%";
    made.root.lastChild.textContent = seen.mark;
    const kv = node.kv === undefined ? "" : ", KV " + percent(node.kv);
    made.root.title = node.id + ": " + seen.words + ", " + (node.running || 0) + " of " + node.slots + " running" + kv + ", first token " + (ms(latest(node.ttft)) || "unknown");
    made.root.setAttribute("aria-label", made.root.title);
  }
  return made.root;
}

// Arrow keys walk the tiles of one pool; Tab leaves them.
function walk(event) {
  const tiles = [...event.currentTarget.children];
  const at = tiles.indexOf(document.activeElement);
  if (at < 0) return;
  const top = tiles[at].offsetTop;
  const columns = Math.max(1, tiles.filter((each) => each.offsetTop === tiles[0].offsetTop).length);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + columns, ArrowUp: at - columns, Home: 0, End: tiles.length - 1 }[event.key];
  if (to === undefined || !tiles[to] || top === undefined) return;
  event.preventDefault();
  tiles[at].tabIndex = -1;
  tiles[to].tabIndex = 0;
  tiles[to].focus();
}

const NODE_HEAD = ["node", "state", "running + waiting / slots", "KV cache", "trust", "first token", ""];
const panels = new Map();

function panel(pool) {
  let made = panels.get(pool.name);
  if (!made) {
    const id = "pool-" + panels.size;
    const head = el("div", { class: "pool-head" }, el("h3", { id, text: pool.name }));
    const tiles = el("div", { class: "tiles", role: "group", "aria-label": "Nodes of " + pool.name + ": arrow keys walk, Enter shows one" });
    tiles.addEventListener("keydown", walk);
    const body = el("tbody");
    const top = el("thead", {}, el("tr", {}, ...NODE_HEAD.map((text) => el("th", { scope: "col", text }))));
    const caption = el("caption");
    const table = el("table", {}, caption, top, body);
    made = { root: el("section", { class: "pool", "aria-labelledby": id }, head, tiles, table), head, tiles, table, caption, body };
    panels.set(pool.name, made);
  }
  return made;
}

function drawPool(pool, nodes) {
  const made = panel(pool);
  const tiled = nodes.length > TABLE_UP_TO;
  const ready = nodes.filter((node) => node.state === "ready").length;
  const running = nodes.reduce((sum, node) => sum + (node.running || 0), 0);
  const waiting = nodes.reduce((sum, node) => sum + (node.waiting || 0), 0);
  const slots = nodes.reduce((sum, node) => sum + (node.state === "ready" ? node.slots : 0), 0);
  const paces = nodes.map((node) => latest(node.ttft)).filter((pace) => pace !== undefined).sort((a, b) => a - b);
  const said = [pool.model, pool.engine, pool.scheduler, ready + " of " + nodes.length + " ready", running + " running, " + waiting + " waiting, " + slots + " slots"];
  if (paces.length) said.push("first token: half under " + ms(paces[Math.floor(paces.length / 2)]) + ", slowest " + ms(paces.at(-1)));
  if (pool.breaker && pool.breaker.state !== "closed") said.push("breaker " + pool.breaker.state.replace("_", " "));
  fill(made.head, [made.head.firstChild, ...said.map((text) => el("span", { text }))]);
  const found = nodes.filter((node) => matches(node, pool.name));
  made.tiles.hidden = !tiled;
  if (tiled) {
    const tiles = nodes.map((node) => tile(pool.name, node));
    nodes.forEach((node, at) => tiles[at].classList.toggle("dim", !matches(node, pool.name)));
    if (!tiles.some((each) => each.tabIndex === 0)) tiles[0].tabIndex = 0;
    fill(made.tiles, tiles);
  }
  const worst = found.map((node) => [verdict(node).rank * 10 + load(node) + (node.kv || 0), node]).sort((a, b) => b[0] - a[0]);
  const shown = tiled ? (state.find ? worst.slice(0, TABLE_UP_TO) : worst.filter(([rank]) => rank >= 10).slice(0, WORST)).map(([, node]) => node) : found;
  made.caption.textContent = !tiled ? "" : state.find ? found.length + " found" : shown.length ? "Need a look" : "";
  made.table.hidden = !shown.length;
  fill(made.body, shown.map((node) => row(pool.name, node)));
  made.root.hidden = Boolean(state.find) && !found.length;
  return made.root;
}

function traffic(into, kind, by) {
  const names = Object.keys(by).sort((a, b) => (by[b].requests || 0) - (by[a].requests || 0));
  const head = ["", "requests", "tokens", "failed", "degraded"];
  fill($(into + "-head"), [el("tr", {}, ...head.map((text, at) => el("th", { scope: "col", class: at ? "n" : "", text: at ? text : kind })))]);
  const rows = names.slice(0, 15).map((name) => {
    const own = by[name];
    const numbers = [own.requests, own.tokens, own.failed, own.degraded].map((n) => el("td", { class: "n", text: n ? count(n) : "" }));
    return el("tr", {}, el("td", { class: "wrap", text: name || "(first pool of the model)" }), ...numbers);
  });
  fill($(into), rows.length ? rows : [nothing("no request in the last minute", head.length)]);
}

const nothing = (text, columns) => el("tr", {}, el("td", { class: "empty", colspan: columns, text }));

function against(used, limit) {
  if (used === undefined) return el("td", { class: "empty", text: "?" });
  if (limit === undefined) return el("td", { text: used ? count(used) : "" });
  return el("td", {}, bar(used / limit), count(used) + "/" + count(limit));
}

function drawSide(board) {
  traffic("rules", "rule", board.rules);
  traffic("aliases", "alias", board.aliases);
  const tenants = board.tenants.slice(0, 20).map((tenant) => {
    const refused = el("td", { class: "n", text: tenant.here.refused ? count(tenant.here.refused) : "" });
    const name = tenant.id + (tenant.waiting ? " (" + tenant.waiting + " waiting)" : "");
    return el("tr", {}, el("td", { class: "wrap", text: name }), against(tenant.requests, tenant.rpm), against(tenant.tokens, tenant.tpm), against(tenant.streams, tenant.max_streams), refused, el("td", { class: "n", text: tenant.cost || "" }));
  });
  fill($("tenants"), tenants);
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.trace : undefined;
  const events = board.events.slice(0, 25).map((event) => {
    const tone = { degraded: "warn" }[event.what] || "bad";
    const glyph = { degraded: "↘", refused: "⊘" }[event.what] || "×";
    const what = el("span", { class: "state", "data-tone": tone, "data-glyph": glyph, text: event.what.replaceAll("_", " ") + (event.code ? ": " + event.code : "") });
    const trace = el("button", { type: "button", "data-trace": event.trace_id, title: "Copy " + event.trace_id, text: event.trace_id.length > 14 ? event.trace_id.slice(0, 6) + "…" + event.trace_id.slice(-6) : event.trace_id });
    trace.addEventListener("click", () => navigator.clipboard && navigator.clipboard.writeText(event.trace_id));
    const who = [event.tenant, event.node || event.model].filter(Boolean).join(" → ");
    return el("tr", {}, el("td", { text: clock(event.at) }), el("td", { class: "wrap" }, what), el("td", { class: "wrap", text: who }), el("td", {}, trace));
  });
  fill($("events"), events.length ? events : [nothing("none lately", 4)]);
  if (focused) {
    const again = [...$("events").querySelectorAll("button")].find((button) => button.dataset.trace === focused);
    if (again) again.focus();
  }
}

const CHARTS = [
  ["requests per second", ["requests"], (n, step) => (n / step).toFixed(1)],
  ["time to first token, P50 and P99", ["ttft_p50_ms", "ttft_p99_ms"], (n) => ms(n)],
  ["tokens per second", ["tokens_per_s"], (n) => count(Math.round(n))],
  ["refused per second", ["refused"], (n, step) => (n / step).toFixed(1)],
];

// One chart: a line per series, the newest value at the right, the highest in words.
function chart(title, lines, show, step) {
  const known = lines.flat().filter((point) => point !== null);
  const top = Math.max(...known, 0);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of [["viewBox", "0 0 360 40"], ["class", "chart"], ["role", "img"], ["preserveAspectRatio", "none"]]) svg.setAttribute(name, value);
  svg.setAttribute("aria-label", title + ": " + lines.map((line) => { const last = line.at(-1); return "now " + (last === null || last === undefined ? "unknown" : show(last, step)); }).join(", ") + ", at most " + show(top, step));
  lines.forEach((line, number) => {
    const points = line.map((point, at) => (point === null ? null : (at * 360) / Math.max(1, line.length - 1) + "," + (38 - (point / (top || 1)) * 36).toFixed(1)));
    let run = [];
    const flush = () => {
      if (run.length) {
        const path = document.createElementNS(svg.namespaceURI, "polyline");
        path.setAttribute("points", run.length > 1 ? run.join(" ") : run[0] + " " + run[0]);
        path.setAttribute("data-line", number);
        svg.append(path);
      }
      run = [];
    };
    points.forEach((point) => (point === null ? flush() : run.push(point)));
    flush();
  });
  return el("figure", {}, el("figcaption", { text: title + " · max " + show(top, step) }), svg);
}

function drawTimelines(board) {
  const data = state.timelines;
  if (!data) return;
  const names = [["pool", data.pools], ["tenant", data.tenants]].flatMap(([kind, each]) => Object.keys(each).map((name) => kind + " " + name));
  const select = $("timeline-of");
  if (names.join() !== [...select.options].map((option) => option.value).join()) {
    const before = select.value;
    fill(select, names.map((name) => el("option", { value: name, text: name })));
    if (names.includes(before)) select.value = before;
  }
  const [kind, ...rest] = select.value.split(" ");
  const series = (kind === "tenant" ? data.tenants : data.pools)[rest.join(" ")];
  fill($("timelines"), series ? CHARTS.map(([title, keys, show]) => chart(title, keys.map((key) => series[key]), show, board.step_s)) : [el("p", { class: "empty", text: "no finished step yet" })]);
}

function draw() {
  const board = state.board;
  if (!board) return;
  const nodes = [...state.nodes.values()];
  $("network").textContent = board.network;
  const minute = Object.values(board.tenants).reduce((sum, tenant) => sum + (tenant.here.requests || 0), 0);
  const ready = nodes.filter((node) => node.state === "ready").length;
  const facts = [["nodes ready", ready + " / " + nodes.length], ["open", board.open], ["requests/min", count(minute)], ["refused", count(board.decisions.refused)], ["configuration", board.configuration]];
  fill($("summary"), facts.map(([term, text]) => el("div", {}, el("dt", { text: term }), el("dd", { text }))));
  fill($("problems"), board.problems.map((text) => el("li", { text })));
  const by = new Map(board.pools.map((pool) => [pool.name, []]));
  const loose = [];
  for (const node of nodes) {
    const own = (node.pools || []).filter((name) => by.has(name));
    own.forEach((name) => by.get(name).push(node));
    if (!own.length) loose.push(node);
  }
  for (const made of cells.values()) made.used = false;
  const pools = board.pools.map((pool) => drawPool(pool, by.get(pool.name)));
  if (loose.length) pools.push(drawPool({ name: "in no pool now", model: "", engine: "", scheduler: "" }, loose));
  for (const [name, made] of cells) if (!made.used) cells.delete(name);
  fill($("pools"), pools);
  drawSide(board);
  drawTimelines(board);
  const shown = $("detail");
  if (shown.open) describe(shown.dataset.node);
}

function describe(id) {
  const node = state.nodes.get(id);
  if (!node) return;
  $("detail").dataset.node = id;
  $("detail-name").textContent = id;
  const breaker = node.breaker || {};
  const facts = [
    ["state", verdict(node).words], ["why", breaker.reason || node.reason], ["pools", (node.pools || []).join(", ")],
    ["model", node.model + " " + node.version + ", " + node.dtype + ", " + node.engine], ["trust", node.trust.toFixed(2)],
    ["running", node.running === undefined ? undefined : node.running + " of " + node.slots], ["waiting", node.waiting],
    ["KV cache", node.kv === undefined ? undefined : percent(node.kv)], ["first token", ms(latest(node.ttft))],
    ["probe", breaker.probe || ms(breaker.ttft_ms)], ["silent for", node.silence_s ? node.silence_s + " s" : undefined],
  ];
  fill($("detail-list"), facts.filter(([, text]) => text !== undefined && text !== "").flatMap(([term, text]) => [el("dt", { text: term }), el("dd", { text })]));
}

function open(id) {
  describe(id);
  $("detail").showModal();
}

function take(event, data) {
  if (event === "board") {
    state.board = data;
    state.nodes = new Map(data.nodes.map((node) => [node.id, node]));
  } else {
    state.board = data.board;
    data.gone.forEach((id) => state.nodes.delete(id));
    data.nodes.forEach((node) => state.nodes.set(node.id, node));
  }
  state.timelines = state.board.timelines || state.timelines;
  document.querySelector("main").hidden = false;
  say("live", "live, " + clock(state.board.at));
  requestAnimationFrame(draw);
}

function say(how, text) {
  $("live").dataset.state = how;
  $("live").textContent = text;
}

function ask(said) {
  $("door").hidden = false;
  $("door-said").textContent = said;
  document.querySelector("main").hidden = true;
  say("wait", "waiting for a key");
  $("key").focus();
}

async function watch() {
  for (let failures = 0; ; failures++) {
    const key = sessionStorage.getItem(KEY);
    if (!key) return ask("");
    try {
      const reply = await fetch("/dashboard/events", { headers: { authorization: "Bearer " + key } });
      if (reply.status === 401) {
        sessionStorage.removeItem(KEY);
        return ask("This key is not known.");
      }
      if (!reply.ok) throw new Error((await reply.json()).detail);
      $("door").hidden = true;
      failures = 0;
      await read(reply.body.getReader());
      throw new Error("the sidecar ended the stream");
    } catch (error) {
      say("lost", "no connection (" + error.message + "); what is shown is old");
    }
    await new Promise((wake) => setTimeout(wake, Math.min(15000, 1000 * 2 ** failures)));
  }
}

async function read(reader) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const [first, second] = text.slice(0, end).split("\n");
      take(first.slice(7), JSON.parse(second.slice(6)));
    }
  }
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = "Theme: " + name;
  localStorage.setItem("din-dashboard-theme", name);
}

$("theme").addEventListener("click", () => theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]));
$("timeline-of").addEventListener("change", draw);
$("find").addEventListener("input", () => {
  state.find = $("find").value.trim().toLowerCase();
  draw();
});
$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  watch();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) {
    event.preventDefault();
    $("find").focus();
  }
  if (event.key === "Escape" && document.activeElement === $("find")) {
    $("find").value = state.find = "";
    draw();
  }
});
const given = new URLSearchParams(location.hash.slice(1)).get("key"); // a fragment never leaves the browser
if (given) {
  sessionStorage.setItem(KEY, given);
  history.replaceState(null, "", location.pathname);
}
const legend = [["✓", "ready"], ["…", "loading"], ["↓", "draining"], ["⊘", "breaker open"], ["½", "half open"], ["↗", "ramping"], ["!", "quarantined"], ["×", "dead"], ["?", "little trust"], ["~", "silent"]];
fill($("legend"), legend.map(([glyph, text]) => el("span", { text: glyph + " " + text })));
theme(localStorage.getItem("din-dashboard-theme") || "system");
watch();
