// The operator's page. Names of adapters and tenants are only ever set as text; the page's policy forbids HTML from text.
"use strict";

const KINDS = ["Free", "Reserved", "KV of requests", "Adapters", "Prefix cache", "Merged weights"];
const KIND_COLOURS = ["free", "reserved", "kv", "weights", "cache", "shadow"];
const [FREE, RESERVED, KV, WEIGHTS] = [0, 1, 2, 3];
const TIERS = { device: "● device", loading: "◌ loading", host: "◐ host", disk: "○ disk", failed: "✕ failed" };
const TIER_ORDER = Object.keys(TIERS);
const MUTED = ["free", "reserved", "other", "other", "cached", "merged"]; // of kinds, where names have the colours
const NUM_COLOURS = 6; // owners with a colour of their own
const LOAD_SECONDS = 60; // time constant of an adapter's load
const CHART_SECONDS = 300;
const SORT_SECONDS = 2; // between two new orders of the list, which stays as it is under the pointer
const HIDDEN_SECONDS = 60; // after which a page that is not looked at ends its stream
const MAX_RETRY_SECONDS = 15;
const MAX_SUGGESTIONS = 50;
const MAX_REQUEST_ROWS = 100;

const $ = (id) => document.getElementById(id);
const root = document.documentElement;
const plain = new Intl.NumberFormat("en");
const BASE = "";

const data = {
  owners: new Uint32Array(0), named: new Map(), adapters: new Map(), requests: new Map(), quarantined: new Map(),
  models: new Map(), tenants: new Map(), prefixes: new Map(), replicas: [], points: [],
  failed: [0, 0],
  stats: null, model: "", watchers: 0, version: "",
};
const view = { by: "kind", of: "adapter", chosen: null, sort: "load", down: true, tier: "", search: "", cursor: -1 };

// --- small helpers ---

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const count = (number) => plain.format(number);
const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : /(ch|s)$/.test(noun) ? "es" : "s"}`;
const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part < whole / 100 ? 1 : 0)} %` : "0 %");
const modelName = (adapter) => (adapter === BASE ? `${data.model} (base)` : adapter);

function size(bytes) {
  const unit = Math.min(4, Math.floor(Math.log10(Math.max(1, bytes)) / 3));
  return `${(bytes / 1000 ** unit).toFixed(unit ? 1 : 0)} ${["bytes", "kB", "MB", "GB", "TB"][unit]}`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

function rate(value) {
  return value === 0 ? "0" : value >= 100 ? count(Math.round(value)) : value.toFixed(1);
}

function stored(storage, name, value) {
  try {
    if (value === undefined) return storage.getItem(name);
    if (value === null) storage.removeItem(name);
    else storage.setItem(name, value);
  } catch { /* storage is switched off: the choice lasts as long as the page */ }
  return null;
}

// --- theme ---

let colours = {};

function setTheme(theme) {
  root.dataset.theme = theme;
  setText($("theme"), theme === "dark" ? "Light" : "Dark");
  $("theme").setAttribute("aria-label", `Switch to ${theme === "dark" ? "light" : "dark"} colours`);
  const style = getComputedStyle(root);
  const names = [...KIND_COLOURS, ...MUTED, "card", "line", "text", "dim", "a", "b", "c", "focus"];
  for (let index = 0; index < NUM_COLOURS; index++) names.push(`o${index}`);
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  paint.all = true;
  redraw();
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
$("theme").addEventListener("click", () => {
  const theme = root.dataset.theme === "dark" ? "light" : "dark";
  stored(localStorage, "chorus-theme", theme);
  setTheme(theme);
});
prefersDark.addEventListener("change", () => {
  if (!stored(localStorage, "chorus-theme")) setTheme(prefersDark.matches ? "dark" : "light");
});

// --- the key ---

let key = stored(sessionStorage, "chorus-key") || "";

function showKeyForm(shown) {
  $("key-form").hidden = !shown;
  $("key-button").setAttribute("aria-expanded", String(shown));
}

function useKey(value) {
  key = value;
  stored(sessionStorage, "chorus-key", value || null);
  showKeyForm(false);
  connect();
}

$("key-button").addEventListener("click", () => {
  showKeyForm($("key-form").hidden);
  if (!$("key-form").hidden) $("key").focus();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value.trim());
  $("key").value = "";
});
$("key-clear").addEventListener("click", () => useKey(""));

const headers = (more) => ({ ...(key ? { authorization: `Bearer ${key}` } : {}), ...more });

// --- the stream ---

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.needsKey = status === 401 || status === 403;
  }
}

async function refusal(response) {
  const text = await response.text();
  try {
    return new Refused(response.status, JSON.parse(text).error.message);
  } catch {
    return new Refused(response.status, `the server answered ${response.status}`);
  }
}

// Calls `take(name, text, bytes)` for each server-sent event of a response.
async function readEvents(response, take) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let bytes = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    bytes += value.length;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      let name = "";
      let text = "";
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) text += line.slice(6);
      }
      take(name, text, bytes);
      bytes = 0;
    }
  }
}

let stream = null; // its AbortController
let retry = 0; // timer
let failures = 0;
let hiddenTimer = 0;

function setStatus(kind, text) {
  $("status").dataset.kind = kind;
  setText($("status"), text);
  $("status").title = text;
  document.body.classList.toggle("stale", kind !== "live" && !(kind === "bad" && data.stats));
}

// Without data there is nothing to show, not even an empty page: only why.
function lock(why) {
  document.body.classList.toggle("locked", why !== null);
  if (why !== null) setText($("locked-why"), why);
}

function disconnect() {
  clearTimeout(retry);
  if (stream) stream.abort();
  stream = null;
}

async function connect() {
  disconnect();
  const own = (stream = new AbortController());
  if (!failures) setStatus("wait", "Connecting …");
  let error = null;
  try {
    const response = await fetch("ui/events", { headers: headers(), signal: own.signal, cache: "no-store" });
    if (!response.ok) throw await refusal(response);
    await readEvents(response, takeEvent);
  } catch (caught) {
    error = caught;
  }
  if (stream !== own) return; // it was ended here
  document.body.classList.add("stale");
  if (error instanceof Refused && error.needsKey) {
    setStatus("bad", key ? `This key can't see the page: ${error.message}` : "An admin key is needed");
    lock(key ? "Give another key: an admin key of this server." : "Give an admin key of this server to see what it does.");
    data.stats = null;
    showKeyForm(true);
    return;
  }
  if (!data.stats) lock("The server does not answer. The page asks again by itself.");
  const wait = Math.min(MAX_RETRY_SECONDS, 2 ** failures++);
  setStatus("wait", error instanceof Refused ? `Not served: ${error.message}` : "The connection was lost; connecting again …");
  retry = setTimeout(connect, 1000 * wait);
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(hiddenTimer);
  if (!document.hidden) {
    if (!stream) connect();
    redraw();
    return;
  }
  hiddenTimer = setTimeout(() => {
    disconnect();
    setStatus("wait", "Paused while hidden");
  }, 1000 * HIDDEN_SECONDS);
});

// --- events into data ---

const cost = { bytes: 0, apply: 0, draw: 0 };

function takeEvent(name, text, bytes) {
  const began = performance.now();
  const event = JSON.parse(text);
  if (name === "snapshot") takeSnapshot(event);
  else if (name === "delta") takeDelta(event);
  failures = 0;
  if (event.trouble) setStatus("bad", `Trouble: ${event.trouble}`);
  else setStatus("live", "Live");
  cost.bytes = bytes;
  cost.apply = performance.now() - began;
  redraw();
}

function takeSnapshot(event) {
  data.model = event.model;
  data.version = event.version;
  data.points = event.points;
  data.named.clear();
  data.requests.clear();
  data.quarantined.clear();
  data.models.clear();
  data.tenants.clear();
  data.prefixes.clear();
  lock(null);
  const loads = new Map([...data.adapters].map(([name, one]) => [name, one.load]));
  data.adapters.clear();
  let total = 0;
  for (let index = 1; index < event.pages.length; index += 2) total += event.pages[index];
  data.owners = new Uint32Array(total);
  for (let index = 0, page = 0; index < event.pages.length; index += 2) {
    data.owners.fill(event.pages[index], page, (page += event.pages[index + 1]));
  }
  takeRows(event);
  for (const [name, one] of data.adapters) one.load = loads.get(name) ?? one.now;
  paint.size = true;
  order.stale = true;
  document.title = `${data.model} · Chorus`;
  setText($("model"), data.model);
  if (!$("ask-model").value) $("ask-model").value = data.model;
}

function takeDelta(event) {
  const pages = event.pages || [];
  for (let index = 0, page = 0; index < pages.length; index += 3) {
    page += pages[index];
    data.owners.fill(pages[index + 2], page, (page += pages[index + 1]));
  }
  paint.all ||= pages.length > 0;
  takeRows(event);
  if (event.point) data.points.push(event.point);
  if (data.points.length > CHART_SECONDS) data.points.splice(0, data.points.length - CHART_SECONDS);
}

function takeRows(event) {
  for (const [number, kind, adapter, tenant] of event.owners || []) data.named.set(number, { kind, adapter, tenant });
  for (const [name, tier, rank, pages, uses, pinned, version, paused] of event.adapters || []) {
    const known = data.adapters.get(name) || { name, load: 0, now: 0, running: 0, waiting: 0 };
    order.stale ||= known.tier !== tier;
    data.adapters.set(name, Object.assign(known, { tier, rank, pages, uses, pinned, version, paused }));
  }
  for (const name of event.gone_adapters || []) data.adapters.delete(name);
  for (const [name, reason] of event.quarantined || []) data.quarantined.set(name, reason);
  for (const name of event.gone_quarantined || []) data.quarantined.delete(name);
  for (const row of event.requests || []) data.requests.set(`${row[0]}\0${row[1]}`, row);
  for (const [adapter, tenant] of event.gone_requests || []) data.requests.delete(`${adapter}\0${tenant}`);
  for (const table of ["models", "tenants", "prefixes"]) {
    for (const row of event[table] || []) data[table].set(row[0], row);
    for (const name of event[`gone_${table}`] || []) data[table].delete(name);
  }
  if (event.gone_adapters) order.stale = true;
  if (!event.stats) return;
  data.stats = event.stats;
  data.replicas = event.replicas;
  data.watchers = event.watchers;
  data.failed = event.failed || data.failed;
  for (const one of data.adapters.values()) one.running = one.waiting = 0;
  for (const [adapter, , running, waiting, paused] of data.requests.values()) {
    const one = data.adapters.get(adapter);
    if (one) {
      one.running += running + paused;
      one.waiting += waiting;
    }
  }
  for (const one of data.adapters.values()) {
    one.now = one.running + one.waiting;
    one.load += (one.now - one.load) / LOAD_SECONDS;
    if (one.load < 0.005) one.load = 0;
  }
}

// --- drawing: once for all events that came since the last frame ---

let pending = false;

function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    if (!data.stats) return;
    const began = performance.now();
    drawTiles();
    drawArena();
    drawAdapters();
    drawChange();
    drawQuarantined();
    drawCharts();
    drawRequests();
    drawUsage();
    cost.draw = performance.now() - began;
    const parts = [`Chorus ${data.version}`, `last event ${count(cost.bytes)} bytes`,
      `read in ${cost.apply.toFixed(1)} ms, drawn in ${cost.draw.toFixed(1)} ms`,
      `${counted(data.watchers, "page")} watching`];
    setText($("foot"), parts.join(" · "));
    root.dataset.events = String(Number(root.dataset.events || 0) + 1);
    root.dataset.frame = (cost.apply + cost.draw).toFixed(2);
  });
}

function drawTiles() {
  const { stats } = data;
  const paused = [...data.requests.values()].reduce((sum, row) => sum + row[4], 0);
  const point = data.points[data.points.length - 1];
  const first = data.points.filter((one) => one[2] !== null && point[0] - one[0] < 60).pop();
  const recent = data.points.slice(-10).map((one) => one[1]);
  const used = stats.pages - stats.free_pages;
  setText($("t-running"), count(Math.max(0, stats.running - paused))); // the two are counted at different times
  setText($("t-running-more"), `${count(paused)} paused · ${count(stats.preemptions)} preempted`);
  setText($("t-waiting"), count(stats.waiting));
  setText($("t-waiting-more"), `${counted(stats.reads, "adapter")} being read`);
  setText($("t-rate"), point ? rate(point[1]) : "–");
  setText($("t-rate-more"), `${rate(recent.reduce((sum, one) => sum + one, 0) / (recent.length || 1))} mean of 10 s`);
  setText($("t-first"), seconds(first && first[2]));
  setText($("t-first-more"), `95th percentile ${seconds(first && first[3])}`);
  setText($("t-arena"), share(used, stats.pages));
  const hits = share(stats.prefix_hit_tokens, stats.prefix_query_tokens);
  setText($("t-arena-more"), `prefix cache hits ${hits}`);
  data.failed.forEach((total, index) => {
    const name = ["t-errors", "t-refused"][index];
    const recent = data.points.reduce((sum, one) => sum + (one[6 + index] || 0), 0);
    setText($(name), count(total));
    setText($(`${name}-more`), `${count(recent)} in five minutes`);
  });
  setText($("t-merged"), stats.merged_adapter === null ? "none" : stats.merged_adapter);
  $("t-merged").title = stats.merged_adapter || "";
  setText($("t-merged-more"), `${counted(stats.merges, "merge")} · ${counted(stats.mode_switches, "switch")}`);
  $("t-merged-more").title = `longest pause for merging: ${seconds(stats.longest_merge_pause)}`;
}

// --- the arena ---

const paint = { all: true, size: true };
const map = { canvas: $("map"), cells: document.createElement("canvas"), columns: 1, rows: 1, cell: 1, each: 1, image: null };
const slots = new Map(); // owner with a colour of its own → number of the colour
let legend = { rows: [], lut: new Uint32Array(0) };

function pixel(colour, fade) {
  const part = (text, at) => parseInt(text.slice(at, at + 2), 16);
  const back = colours.card;
  const mix = (at) => Math.round(part(colour, at) * fade + part(back, at) * (1 - fade));
  return ((255 << 24) | (mix(5) << 16) | (mix(3) << 8) | mix(1)) >>> 0; // little-endian RGBA
}

function ownerOf(number) {
  return data.named.get(number) || { kind: number, adapter: null, tenant: null };
}

function nameOf(owner) {
  if (view.by === "adapter" && owner.adapter !== null) return modelName(owner.adapter);
  if (view.by === "tenant" && owner.kind === KV && owner.tenant !== null) return owner.tenant || "(no tenant)";
  return null;
}

// Pages by group of the legend. The largest groups keep the colour that they have as long as they are among them.
function groups() {
  const pagesOf = new Uint32Array(mostOwner() + 1);
  for (const number of data.owners) pagesOf[number]++;
  const kindColours = view.by === "kind" ? KIND_COLOURS : MUTED;
  const kinds = KINDS.map((label, kind) => ({ label, colour: kindColours[kind], pages: 0, owners: [] }));
  const named = new Map();
  for (let number = 0; number < pagesOf.length; number++) {
    const pages = pagesOf[number];
    if (!pages) continue;
    const owner = ownerOf(number);
    const name = nameOf(owner);
    let group = kinds[owner.kind];
    if (name !== null) {
      if (!named.has(name)) named.set(name, { label: name, pages: 0, owners: [] });
      group = named.get(name);
    }
    group.pages += pages;
    group.owners.push(number);
  }
  const largest = [...named.values()].sort((one, two) => two.pages - one.pages || (one.label < two.label ? -1 : 1));
  const rest = { label: `${count(Math.max(0, largest.length - NUM_COLOURS))} other ${view.by}s`, colour: "other", pages: 0, owners: [] };
  const top = largest.splice(0, NUM_COLOURS);
  for (const group of largest) {
    rest.pages += group.pages;
    rest.owners.push(...group.owners);
  }
  for (const name of slots.keys()) if (!top.some((group) => group.label === name)) slots.delete(name);
  const taken = new Set(slots.values());
  for (const group of top) {
    if (!slots.has(group.label)) {
      let slot = 0;
      while (taken.has(slot)) slot++;
      taken.add(slot);
      slots.set(group.label, slot);
    }
    group.colour = `o${slots.get(group.label)}`;
  }
  top.sort((one, two) => slots.get(one.label) - slots.get(two.label));
  const shown = view.by === "kind" ? kinds : kinds.filter((one, kind) => one.pages || ![KV, WEIGHTS].includes(kind));
  return [...top, ...(view.by === "kind" ? [] : [rest]), ...shown];
}

function mostOwner() {
  return KINDS.length + data.named.size; // owners are numbered as they come
}

function setLut(rows) {
  const lut = new Uint32Array(mostOwner() + 1);
  for (const group of rows) {
    const full = pixel(colours[group.colour], 1);
    const faint = pixel(colours[group.colour], 0.18);
    for (const number of group.owners) {
      lut[number] = view.chosen === null || ownerOf(number).adapter === view.chosen ? full : faint;
    }
  }
  legend = { rows, lut };
}

function sizeMap() {
  const { canvas } = map;
  const scale = devicePixelRatio || 1;
  const width = Math.max(1, Math.round(canvas.clientWidth * scale));
  const total = Math.max(1, data.owners.length);
  const most = Math.round((innerWidth < 720 ? 220 : 300) * scale);
  let cell = Math.round(16 * scale);
  while (cell > 1 && Math.ceil(total / Math.floor(width / cell)) * cell > most) cell--;
  map.each = Math.max(1, Math.ceil(total / (Math.floor(width / cell) * Math.floor(most / cell))));
  map.cell = cell;
  map.columns = Math.floor(width / cell);
  map.rows = Math.ceil(total / map.each / map.columns);
  canvas.width = width;
  canvas.height = map.rows * cell;
  canvas.style.height = `${canvas.height / scale}px`;
  map.cells.width = map.columns;
  map.cells.height = map.rows;
  map.image = map.cells.getContext("2d").createImageData(map.columns, map.rows);
  paint.all = true;
}

function drawArena() {
  const isHere = data.owners.length > 0;
  $("arena-pages").hidden = $("arena-by").hidden = !isHere;
  $("arena-replicas").hidden = isHere;
  const { stats } = data;
  setText($("arena-size"), `${count(stats.pages)} pages, ${count(stats.free_pages)} free`);
  const below = [[stats.host_cached_bytes, "in host memory"], [stats.disk_bytes, "in files"]];
  const tiers = below.filter((one) => one[0]).map(([bytes, where]) => `${size(bytes)} ${where}`);
  setText($("prefixes"), `Idle prefixes: ${[counted(stats.cached_pages, "page"), ...tiers].join(" · ")}`);
  if (!isHere) {
    drawReplicas();
    return;
  }
  if (paint.size || map.canvas.clientWidth * (devicePixelRatio || 1) - map.canvas.width > 1) sizeMap();
  paint.size = false;
  if (!paint.all) return;
  paint.all = false;
  const rows = groups();
  setLut(rows);
  drawLegend(rows, data.owners.length);
  const cells = new Uint32Array(map.image.data.buffer);
  const { lut } = legend;
  cells.fill(0);
  if (map.each === 1) for (let page = 0; page < data.owners.length; page++) cells[page] = lut[data.owners[page]];
  else for (let at = 0; at * map.each < data.owners.length; at++) cells[at] = lut[mostly(at)];
  map.cells.getContext("2d").putImageData(map.image, 0, 0);
  drawMap();
  setText($("page"), view.cursor < 0 ? describeChosen() : describePage(view.cursor));
  const used = rows.filter((one) => one.pages).map((one) => `${one.label}: ${count(one.pages)}`);
  map.canvas.setAttribute("aria-label", `Map of ${count(data.owners.length)} pages. ${used.join(", ")}`);
}

// Where a cell stands for several pages: an owner of one that is in use, if any is.
function mostly(at) {
  const end = Math.min(data.owners.length, (at + 1) * map.each);
  for (let page = at * map.each; page < end; page++) if (data.owners[page] !== FREE) return data.owners[page];
  return FREE;
}

function drawMap() {
  const { canvas, cell } = map;
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.drawImage(map.cells, 0, 0, map.columns * cell, map.rows * cell);
  if (cell >= 4) {
    context.fillStyle = colours.card;
    for (let column = 1; column < map.columns; column++) context.fillRect(column * cell - 1, 0, 1, canvas.height);
    for (let row = 1; row < map.rows; row++) context.fillRect(0, row * cell - 1, canvas.width, 1);
  }
  if (view.cursor >= 0) {
    const at = Math.floor(view.cursor / map.each);
    context.strokeStyle = colours.text;
    context.lineWidth = 2;
    context.strokeRect((at % map.columns) * cell, Math.floor(at / map.columns) * cell, Math.max(4, cell), Math.max(4, cell));
  }
}

function drawLegend(rows, total) {
  fill($("legend"), rows, () => make("li", {}, make("i"), make("span"), make("em")), (item, group) => {
    item.children[0].style.background = colours[group.colour];
    setText(item.children[1], group.label);
    item.children[1].title = group.label;
    setText(item.children[2], `${counted(group.pages, "page")} · ${share(group.pages, total)}`);
  });
}

// Children of an element, one for each item: kept, added or removed, and brought up to date.
function fill(parent, items, create, update) {
  while (parent.children.length > items.length) parent.lastChild.remove();
  while (parent.children.length < items.length) parent.append(create());
  items.forEach((item, index) => update(parent.children[index], item));
}

function describePage(page) {
  const owner = ownerOf(data.owners[page]);
  let text = `Page ${count(page)}: ${KINDS[owner.kind]}`;
  if (owner.kind === KV && owner.adapter !== null) text += ` of ${modelName(owner.adapter)}, tenant ${owner.tenant || "(none)"}`;
  else if (owner.kind === WEIGHTS && owner.adapter) text += `: ${owner.adapter}`;
  else if (owner.kind === KV) text += " that is being copied to host memory";
  return text;
}

function point(page, announce) {
  if (page < 0 || page >= data.owners.length) return;
  view.cursor = page;
  $("page").setAttribute("aria-live", announce ? "polite" : "off");
  setText($("page"), describePage(page));
  drawMap();
}

map.canvas.addEventListener("pointermove", (event) => {
  const scale = devicePixelRatio || 1;
  const column = Math.floor((event.offsetX * scale) / map.cell);
  const row = Math.floor((event.offsetY * scale) / map.cell);
  if (column < map.columns) point((row * map.columns + column) * map.each, false);
});
function describeChosen() {
  if (view.chosen === null) return "Point at a page, or move with the arrow keys, to see its owner.";
  const sums = new Uint32Array(KINDS.length);
  for (const number of data.owners) {
    const owner = ownerOf(number);
    if (owner.adapter === view.chosen) sums[owner.kind]++;
  }
  return `${view.chosen}: ${counted(sums[WEIGHTS], "page")} of weights, ${sums[KV]} of KV. Choose it again to see all.`;
}

map.canvas.addEventListener("pointerleave", () => {
  view.cursor = -1;
  setText($("page"), describeChosen());
  if (data.stats) drawMap();
});
map.canvas.addEventListener("click", () => {
  if (view.cursor >= 0) choose(ownerOf(data.owners[view.cursor]).adapter);
});
map.canvas.addEventListener("keydown", (event) => {
  const row = map.columns * map.each;
  const steps = { ArrowLeft: -map.each, ArrowRight: map.each, ArrowUp: -row, ArrowDown: row };
  if (event.key in steps) {
    event.preventDefault();
    point(view.cursor < 0 ? 0 : view.cursor + steps[event.key], true);
  } else if (event.key === "Enter" && view.cursor >= 0) choose(ownerOf(data.owners[view.cursor]).adapter);
});
for (const input of document.querySelectorAll("input[name=by]")) {
  input.addEventListener("change", () => {
    view.by = input.value;
    slots.clear();
    paint.all = true;
    redraw();
  });
}

// --- replicas, in a cluster ---

const speeds = new Map(); // tokens of each replica, when they were counted, and the latest rate

function drawReplicas() {
  const now = performance.now();
  const create = () => make("tr", {}, make("td"), make("td", {}, make("div", { className: "bar" })),
    make("td", { className: "n" }), make("td", { className: "n" }), make("td", { className: "n" }));
  fill($("replicas"), data.replicas, create, (row, [name, state, stats]) => {
    const [label, bar, running, waiting, tokens] = row.children;
    setText(label, state === "up" ? name : `${name} (${state})`);
    if (!stats) return;
    const parts = [stats.free_pages, 0, stats.kv_pages, stats.adapter_pages, stats.cached_pages, stats.shadow_pages];
    const order = [KV, WEIGHTS, 4, 5, FREE];
    fill(bar.firstChild, order, () => make("i"), (part, kind) => {
      part.style.background = colours[KIND_COLOURS[kind]];
      part.style.width = `${(100 * parts[kind]) / (stats.pages || 1)}%`;
    });
    bar.title = order.map((kind) => `${KINDS[kind]}: ${count(parts[kind])}`).join(", ");
    const before = speeds.get(name);
    if (!before || before.tokens !== stats.generated_tokens || now - before.at > 2000) {
      const speed = before ? (1000 * Math.max(0, stats.generated_tokens - before.tokens)) / (now - before.at) : 0;
      speeds.set(name, { tokens: stats.generated_tokens, at: now, speed });
    }
    setText(running, count(stats.running));
    setText(waiting, count(stats.waiting));
    setText(tokens, rate(speeds.get(name).speed));
  });
  const { stats } = data;
  const pages = [stats.free_pages, 0, stats.kv_pages, stats.adapter_pages, stats.cached_pages, stats.shadow_pages];
  const rows = KINDS.map((label, kind) => ({ label, colour: KIND_COLOURS[kind], pages: pages[kind] }));
  drawLegend(rows.filter((one) => one.label !== KINDS[RESERVED]), stats.pages);
}

// --- adapters ---

const COLUMNS = [
  ["name", "Adapter", false], ["tier", "Tier", false], ["version", "Version", false], ["load", "Load", false], ["running", "Running", true],
  ["waiting", "Waiting", true], ["pages", "Pages", true], ["rank", "Rank", true], ["uses", "Begun", true],
];
const order = { stale: true, at: 0, rows: [], most: 1 };
let active = 0;

for (const [name, label, isNumber] of COLUMNS) {
  const button = make("button", { type: "button", textContent: label });
  const cell = make("div", { className: isNumber ? "n" : "" }, button);
  cell.setAttribute("role", "columnheader");
  cell.dataset.sort = name;
  button.addEventListener("click", () => {
    view.down = view.sort === name ? !view.down : name !== "name" && name !== "tier";
    view.sort = name;
    reorder();
  });
  $("columns").append(cell);
}

function reorder() {
  order.stale = true;
  order.at = 0;
  redraw();
}

function value(one, name) {
  if (name === "version") return String(one.version ?? "").padStart(12);
  return name === "tier" ? TIER_ORDER.indexOf(one.tier) : one[name] ?? -1;
}

function sortAdapters() {
  const text = view.search.toLowerCase();
  const rows = [...data.adapters.values()].filter(
    (one) => (!view.tier || one.tier === view.tier) && (!text || one.name.toLowerCase().includes(text)));
  const sign = view.down ? -1 : 1;
  const keys = [view.sort, "uses"];
  rows.sort((one, two) => {
    for (const name of keys) {
      const [left, right] = [value(one, name), value(two, name)];
      if (left !== right) return (left < right ? -1 : 1) * (name === view.sort ? sign : -1);
    }
    const [left, right] = [value(one, "tier"), value(two, "tier")];
    return left - right || (one.name < two.name ? -1 : 1);
  });
  Object.assign(order, { rows, stale: false, at: performance.now() });
  for (const cell of $("columns").children) {
    const isSorted = cell.dataset.sort === view.sort;
    cell.setAttribute("aria-sort", isSorted ? (view.down ? "descending" : "ascending") : "none");
    const [, label] = COLUMNS.find(([name]) => name === cell.dataset.sort);
    setText(cell.firstChild, isSorted ? `${label} ${view.down ? "↓" : "↑"}` : label);
  }
}

function drawAdapters() {
  const isHeld = $("scroll").matches(":hover") || $("scroll").contains(document.activeElement);
  if (order.at === 0 || (!isHeld && performance.now() - order.at > 1000 * SORT_SECONDS)) sortAdapters();
  order.rows = order.rows.filter((one) => data.adapters.has(one.name));
  order.most = 1;
  for (const one of data.adapters.values()) order.most = Math.max(order.most, one.load);
  drawChips();
  drawRows();
}

function drawChips() {
  const tiers = new Map(TIER_ORDER.map((tier) => [tier, 0]));
  for (const one of data.adapters.values()) tiers.set(one.tier, tiers.get(one.tier) + 1);
  const shown = [["", "All", data.adapters.size], ...[...tiers].map(([tier, number]) => [tier, TIERS[tier], number])]
    .filter(([tier, , number]) => number || ["", "device", "host", "disk", view.tier].includes(tier));
  const create = () => {
    const chip = make("button", { type: "button" });
    chip.addEventListener("click", () => {
      view.tier = chip.dataset.tier;
      reorder();
    });
    return chip;
  };
  fill($("tiers"), shown, create, (chip, [tier, label, number]) => {
    chip.dataset.tier = tier;
    chip.setAttribute("aria-pressed", String(view.tier === tier));
    setText(chip, `${label} ${count(number)}`);
  });
}

function makeRow() {
  const row = make("div", { className: "row" });
  row.setAttribute("role", "row");
  for (const [, , isNumber] of COLUMNS) {
    const cell = make("div", { className: isNumber ? "n" : "" });
    cell.setAttribute("role", "gridcell");
    row.append(cell);
  }
  row.children[3].className = "load";
  row.children[3].append(make("i"), make("span"));
  row.addEventListener("click", () => {
    active = Number(row.dataset.at);
    choose(order.rows[active].name);
  });
  return row;
}

let rowHeight = 30; // more where a row has several lines, see ui.css

function drawRows() {
  rowHeight = parseFloat(getComputedStyle($("scroll")).getPropertyValue("--row")) || 30;
  const scroll = $("scroll");
  const space = $("space");
  const { rows } = order;
  active = Math.max(0, Math.min(active, rows.length - 1));
  const height = `${Math.max(rows.length * rowHeight, 80)}px`;
  if (space.style.height !== height) space.style.height = height;
  scroll.setAttribute("aria-rowcount", String(rows.length + 1));
  const first = Math.max(0, Math.floor(scroll.scrollTop / rowHeight) - 1);
  const shown = rows.slice(first, first + Math.ceil(scroll.clientHeight / rowHeight) + 2);
  let empty = space.querySelector(".empty");
  if (!rows.length !== !!empty) {
    if (empty) empty.remove();
    else space.append(make("p", { className: "empty" }));
    empty = space.querySelector(".empty");
  }
  if (empty) setText(empty, data.adapters.size ? "No adapter matches." : "No adapter is registered.");
  const pool = [...space.querySelectorAll(".row")];
  while (pool.length > shown.length) pool.pop().remove();
  while (pool.length < shown.length) pool.push(space.appendChild(makeRow()));
  shown.forEach((one, index) => updateRow(pool[index], one, first + index));
  if (rows.length) scroll.setAttribute("aria-activedescendant", `adapter-${active}`);
  else scroll.removeAttribute("aria-activedescendant");
}

function updateRow(row, one, at) {
  row.dataset.at = at;
  row.id = `adapter-${at}`;
  row.style.transform = `translateY(${at * rowHeight}px)`;
  row.setAttribute("aria-rowindex", String(at + 2));
  row.setAttribute("aria-selected", String(view.chosen === one.name));
  row.classList.toggle("active", at === active);
  const [name, tier, version, load, ...numbers] = row.children;
  setText(name, one.name);
  name.title = one.name;
  setText(tier, `${TIERS[one.tier]}${one.pinned ? " 📌" : ""}${one.paused ? " ⏸" : ""}`);
  tier.title = `${one.tier}${one.pinned ? ", pinned" : ""}${one.paused ? ", paused" : ""}`;
  setText(version, one.version || "–");
  version.title = one.version || "";
  load.firstChild.style.setProperty("--part", (one.load / order.most).toFixed(3));
  setText(load.lastChild, one.load ? one.load.toFixed(one.load < 10 ? 1 : 0) : "0");
  [one.running, one.waiting, one.pages || null, one.rank, one.uses].forEach((number, index) => {
    setText(numbers[index], number === null || number === undefined ? "–" : count(number));
  });
}

function choose(name) {
  view.chosen = name === null || name === view.chosen || !data.adapters.has(name) ? null : name;
  if (view.chosen !== null) $("ask-model").value = view.chosen;
  paint.all = true;
  redraw();
}

$("scroll").addEventListener("scroll", () => requestAnimationFrame(drawRows), { passive: true });
$("scroll").addEventListener("keydown", (event) => {
  const page = Math.floor($("scroll").clientHeight / rowHeight);
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
  if (event.key in steps) {
    event.preventDefault();
    active = Math.max(0, Math.min(order.rows.length - 1, active + steps[event.key]));
    const [top, height] = [active * rowHeight, $("scroll").clientHeight - rowHeight]; // the names' row stays
    if (top < $("scroll").scrollTop) $("scroll").scrollTop = top;
    else if (top + rowHeight > $("scroll").scrollTop + height) $("scroll").scrollTop = top + rowHeight - height;
    drawRows();
  } else if ((event.key === "Enter" || event.key === " ") && order.rows.length) {
    event.preventDefault();
    choose(order.rows[active].name);
  }
});
$("search").addEventListener("input", () => {
  view.search = $("search").value.trim();
  $("scroll").scrollTop = active = 0;
  reorder();
});

// --- what an operator may change ---

let changing = false;

function drawChange() {
  const one = view.chosen === null ? undefined : data.adapters.get(view.chosen);
  $("change").hidden = !one;
  if (!one) return;
  setText($("change-name"), one.name);
  setText($("do-pin"), one.pinned ? "Unpin" : "Pin");
  setText($("do-pause"), one.paused ? "Resume" : "Pause");
  for (const id of ["do-pin", "do-pause", "do-unload", "do-end"]) $(id).disabled = changing;
}

function drawQuarantined() {
  const rows = [...data.quarantined].sort(([one], [two]) => (one < two ? -1 : 1));
  $("aside").hidden = !rows.length;
  setText($("aside-count"), count(rows.length));
  fill($("quarantined"), rows.slice(0, MAX_REQUEST_ROWS), () => make("li", {}, make("b"), make("span")), (item, [name, reason]) => {
    setText(item.children[0], name);
    setText(item.children[1], reason);
  });
}

let settle = () => {}; // what the question that is open waits for

// True once the operator has said yes; Escape and No are no.
function confirmed(text) {
  setText($("confirm-text"), text);
  $("confirm").showModal();
  return new Promise((resolve) => (settle = resolve));
}

function answerQuestion(yes) {
  $("confirm").close();
  settle(yes);
}
$("confirm-yes").addEventListener("click", () => answerQuestion(true));
$("confirm-no").addEventListener("click", () => answerQuestion(false));
$("confirm").addEventListener("cancel", () => settle(false));

const adapterPath = (name) => `v1/adapters/${name.split("/").map(encodeURIComponent).join("/")}`;

// Asks, then sends a change. The key is a header, which no other site's page can add, and the server refuses other origins.
async function change(question, done, path, options) {
  if (changing || !(await confirmed(question))) return false;
  changing = true;
  setText($("change-state"), "Working …");
  $("change-state").classList.remove("bad");
  drawChange();
  try {
    const response = await fetch(path, { ...options, headers: headers(options.headers), credentials: "omit" });
    if (!response.ok) throw await refusal(response);
    setText($("change-state"), done);
    return true;
  } catch (error) {
    $("change-state").classList.add("bad");
    setText($("change-state"), error.message);
    return false;
  } finally {
    changing = false;
    drawChange();
  }
}

const asJson = (method, body) => ({ method, headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

$("do-pin").addEventListener("click", () => {
  const { name, pinned } = data.adapters.get(view.chosen);
  const question = pinned ? `Unpin ${name}? Its pages may then go to others.` : `Pin ${name}? It is loaded, and keeps its pages.`;
  change(question, `${name} is ${pinned ? "not pinned any more" : "pinned"}.`, adapterPath(name), asJson("PATCH", { pinned: !pinned }));
});
$("do-pause").addEventListener("click", () => {
  const { name, paused } = data.adapters.get(view.chosen);
  const question = paused ? `Let ${name} take requests again?` : `Pause ${name}? New requests for all of its versions are refused.`;
  change(question, `${name} is ${paused ? "served again" : "paused"}.`, adapterPath(name), asJson("PATCH", { paused: !paused }));
});
$("do-unload").addEventListener("click", () => {
  const name = view.chosen;
  change(`Unload ${name}? Requests in progress finish with it.`, `${name} is unloaded.`, adapterPath(name), { method: "DELETE" });
});
$("do-end").addEventListener("click", () => {
  const name = view.chosen;
  change(`Unload ${name} at once? Its requests in progress end with an error.`, `${name} is unloaded.`,
    `${adapterPath(name)}?force=true`, { method: "DELETE" });
});
$("load-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const [name, path] = [$("load-name").value.trim(), $("load-path").value.trim()];
  const [config, weights] = [$("load-config").files[0], $("load-weights").files[0]];
  let options = asJson("POST", { name, path });
  if (!path) {
    const body = new FormData();
    body.append("name", name);
    if (config) body.append("adapter_config", config, "adapter_config.json");
    if (weights) body.append("adapter_model", weights, "adapter_model.safetensors");
    options = { method: "POST", body };
  }
  const known = data.adapters.has(name);
  const question = known ? `Replace ${name}? Requests in progress finish with the version that is there.` : `Load ${name}?`;
  if (await change(question, `${name} is loaded.`, "v1/adapters", options)) $("load-form").reset();
});

// --- what adapters and tenants have used, and where cached prefixes are ---

const USED = [ // label, at in a row, how it is written, title
  ["Requests", 1, count, "ended choices"], ["Errors", 2, count, "choices that ended with an error"],
  ["Tokens in", 3, count, "tokens of prompts"], ["Tokens cached", 4, count, "tokens of prompts that the prefix cache had"],
  ["Tokens out", 5, count, "generated tokens"], ["Queue", 6, seconds, "mean time to admission"],
  ["First token", 7, seconds, "mean time to the first token"], ["Per token", 8, seconds, "mean time per further token"],
  ["KV, page seconds", 9, count, "pages of KV times the seconds that they were held"],
];
const USED_BY = {
  models: [...USED, ["Weights, page seconds", 10, count, "pages of weights times the seconds that they were held"],
    ["Load", 11, seconds, "mean time of a load"]],
  tenants: [...USED, ["Tokens left", 10, count, "tokens that its key may use now"]],
  prefixes: [
    ["Tokens in the pool", 1, count, "tokens of cached prefixes that a step can use"],
    ["Tokens in host memory", 2, count, "tokens of cached prefixes that are copied back when a prompt begins with them"],
    ["Tokens in files", 3, count, "tokens of cached prefixes that are read when a prompt begins with them"],
  ],
};
const NONE_USED = { models: "Nothing has been used yet.", tenants: "Nothing has been used yet.", prefixes: "No prefix is cached." };
const usedName = (row) => (used.by === "prefixes" ? modelName(row[0]) : row[0] || "(no tenant)");
const MAX_USED_ROWS = 200;
const used = { by: "models", sort: 5, down: true, search: "" };

function drawUsage() {
  const columns = [["Name", 0, String, ""], ...USED_BY[used.by]];
  const table = data[used.by];
  const found = [...table.values()].filter((row) => !used.search || usedName(row).toLowerCase().includes(used.search));
  const sign = used.down ? -1 : 1;
  found.sort((one, two) => {
    const [left, right] = [one[used.sort] ?? -1, two[used.sort] ?? -1];
    return left === right ? (one[0] < two[0] ? -1 : 1) : (left < right ? -1 : 1) * sign;
  });
  const head = () => {
    const button = make("button", { type: "button" });
    button.addEventListener("click", () => {
      const at = Number(button.dataset.at);
      used.down = used.sort === at ? !used.down : at !== 0;
      used.sort = at;
      redraw();
    });
    const cell = make("th", { scope: "col" }, button);
    return cell;
  };
  fill($("usage-columns"), columns, head, (cell, [name, at, , title]) => {
    const isSorted = at === used.sort;
    cell.className = at ? "n" : "";
    cell.setAttribute("aria-sort", isSorted ? (used.down ? "descending" : "ascending") : "none");
    cell.firstChild.dataset.at = at;
    cell.firstChild.title = title;
    setText(cell.firstChild, isSorted ? `${name} ${used.down ? "↓" : "↑"}` : name);
  });
  const shown = found.slice(0, MAX_USED_ROWS);
  fill($("usage"), shown, () => make("tr"), (line, row) => {
    fill(line, columns, () => make("td"), (cell, [, at, write]) => {
      cell.className = at ? "n" : "";
      if (!at) cell.title = usedName(row);
      setText(cell, row[at] === null || row[at] === undefined ? "–" : at ? write(row[at]) : usedName(row));
    });
  });
  const more = found.length > shown.length ? `the first ${count(shown.length)} of ${count(found.length)}; sort or search for others` : "";
  setText($("usage-note"), !table.size ? NONE_USED[used.by] : more && `These are ${more}.`);
}

for (const input of document.querySelectorAll("#usage-by input")) {
  input.addEventListener("change", () => {
    used.by = input.value;
    used.sort = Math.min(used.sort, USED_BY[used.by].length);
    redraw();
  });
}
$("usage-search").addEventListener("input", () => {
  used.search = $("usage-search").value.trim().toLowerCase();
  redraw();
});

// --- charts ---

function drawCharts() {
  const points = data.points;
  const last = points[points.length - 1];
  chart($("c-rate"), [[1, "a"]], 10, rate);
  chart($("c-first"), [[3, "b"], [2, "a"]], 0.1, seconds);
  chart($("c-requests"), [[5, "b"], [4, "a"]], 2, (number) => count(Math.round(number)));
  if (!last) return;
  setText($("c-rate-now"), `now ${rate(last[1])}`);
  setText($("c-first-now"), last[2] === null ? "none just now" : `now ${seconds(last[2])} and ${seconds(last[3])}`);
  setText($("c-requests-now"), `now ${count(last[4])} and ${count(last[5])}`);
}

function niceMost(most) {
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= most * 0.999);
}

// lines: index in a point, and colour. least: that the axis reaches up to.
function chart(canvas, lines, least, text) {
  const scale = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  const [left, top, right, bottom] = [54, 6, width - 4, height - 18];
  const points = data.points;
  const end = points.length ? points[points.length - 1][0] : 0;
  const most = niceMost(Math.max(...points.flatMap((one) => lines.map(([at]) => one[at] || 0)), least));
  const span = Math.min(CHART_SECONDS, Math.max(60, points.length ? end - points[0][0] : 0)); // no blank half of a young server
  const x = (time) => right - ((end - time) / span) * (right - left);
  const y = (number) => bottom - (number / most) * (bottom - top);
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colours.dim;
  context.strokeStyle = colours.line;
  context.lineWidth = 1;
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const part of [0, 0.5, 1]) {
    const at = Math.round(y(part * most)) + 0.5;
    context.beginPath();
    context.moveTo(left, at);
    context.lineTo(right, at);
    context.stroke();
    context.fillText(part ? text(part * most) : "0", left - 6, at);
  }
  context.textBaseline = "alphabetic";
  const step = [15, 30, 60, 120].find((one) => span / one <= (width < 480 ? 2.5 : 5));
  for (let ago = 0; ago <= span; ago += step) {
    context.textAlign = ago === 0 ? "right" : ago === span ? "left" : "center";
    context.fillText(ago === 0 ? "now" : ago % 60 ? `−${ago} s` : `−${ago / 60} min`, x(end - ago), height - 4);
  }
  for (const [at, colour] of lines) {
    context.strokeStyle = context.fillStyle = colours[colour];
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.beginPath();
    let before = null;
    for (const one of points) {
      if (one[at] === null || end - one[0] > CHART_SECONDS) continue;
      if (before !== null && one[0] - before < 15) context.lineTo(x(one[0]), y(one[at]));
      else context.moveTo(x(one[0]), y(one[at]));
      before = one[0];
    }
    context.stroke();
    if (before !== null && points[points.length - 1][at] !== null) {
      context.beginPath();
      context.arc(x(end) - 2, y(points[points.length - 1][at]), 2.5, 0, 7);
      context.fill();
    }
  }
}

// --- requests ---

function drawRequests() {
  const totals = new Map();
  for (const [adapter, tenant, ...numbers] of data.requests.values()) {
    const name = view.of === "adapter" ? modelName(adapter) : tenant || "(no tenant)";
    const sums = totals.get(name) || totals.set(name, [name, 0, 0, 0]).get(name);
    numbers.forEach((number, index) => (sums[index + 1] += number));
  }
  const all = ([, running, waiting, paused]) => running + waiting + paused;
  const rows = [...totals.values()].sort((one, two) => all(two) - all(one) || (one[0] < two[0] ? -1 : 1));
  const most = rows.length ? all(rows[0]) : 1;
  const create = () => make("tr", {}, make("td"), make("td", { className: "gauge" }, make("div", { className: "bar" },
    make("i", { className: "a" }), make("i", { className: "b" }), make("i", { className: "c" }))),
  make("td", { className: "n" }), make("td", { className: "n" }), make("td", { className: "n" }));
  fill($("requests"), rows.slice(0, MAX_REQUEST_ROWS), create, (row, [name, ...numbers]) => {
    setText(row.children[0], name);
    row.children[0].title = name;
    numbers.forEach((number, index) => {
      row.children[1].firstChild.children[index].style.width = `${(100 * number) / most}%`;
      setText(row.children[2 + index], count(number));
    });
  });
  $("requests-empty").hidden = rows.length > 0;
  const more = rows.length - MAX_REQUEST_ROWS;
  setText($("requests-note"), `${counted(rows.length, view.of)} with requests in progress${more > 0 ? `, ${count(more)} more than shown` : ""}.`);
}

for (const input of document.querySelectorAll("input[name=of]")) {
  input.addEventListener("change", () => {
    view.of = input.value;
    setText($("requests-name"), view.of === "adapter" ? "Adapter" : "Tenant");
    redraw();
  });
}

// --- the box to try an adapter ---

let asking = null;

$("ask-model").addEventListener("input", () => {
  const text = $("ask-model").value.toLowerCase();
  const names = [];
  for (const name of [data.model, ...data.adapters.keys()]) {
    if (name.toLowerCase().includes(text)) names.push(name);
    if (names.length === MAX_SUGGESTIONS) break;
  }
  fill($("ask-names"), names, () => make("option"), (option, name) => (option.value = name));
});
$("ask-stop").addEventListener("click", () => asking && asking.abort());
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!asking) ask();
});

async function ask() {
  const isChat = $("ask-as").value === "chat";
  const prompt = $("ask-prompt").value;
  const body = {
    model: $("ask-model").value.trim(), stream: true, max_tokens: Number($("ask-tokens").value) || 128,
    temperature: Number($("ask-heat").value), stream_options: { include_usage: true },
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
  };
  const answer = $("answer");
  const began = performance.now();
  let first = null;
  let tokens = 0;
  asking = new AbortController();
  answer.textContent = "";
  answer.classList.remove("bad");
  $("ask-send").disabled = true;
  $("ask-stop").disabled = false;
  setText($("ask-state"), "Waiting for the first token …");
  const report = (end) => {
    const took = (performance.now() - first) / 1000;
    const speed = tokens > 1 && took > 0 ? `, ${rate((tokens - 1) / took)} tokens a second` : "";
    setText($("ask-state"), `${end}First token after ${seconds((first - began) / 1000)}, ${count(tokens)} tokens${speed}`);
  };
  try {
    const path = isChat ? "v1/chat/completions" : "v1/completions";
    const response = await fetch(path, {
      method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body),
      signal: asking.signal,
    });
    if (!response.ok) throw await refusal(response);
    await readEvents(response, (_, text) => {
      if (text === "[DONE]") return;
      const event = JSON.parse(text);
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      const delta = choice && (isChat ? choice.delta.content : choice.text);
      if (delta) {
        if (first === null) {
          first = performance.now();
          setText($("ask-state"), "Answering …");
        }
        tokens += 1;
        answer.append(delta);
        answer.scrollTop = answer.scrollHeight;
      }
      if (event.usage) tokens = event.usage.completion_tokens;
    });
    if (first === null) setText($("ask-state"), "The answer is empty.");
    else report("");
  } catch (error) {
    if (error.name === "AbortError") {
      if (first === null) setText($("ask-state"), "Stopped.");
      else report("Stopped. ");
    } else {
      answer.classList.add("bad");
      answer.append(`${answer.textContent ? "\n" : ""}${error.message}`);
      setText($("ask-state"), "It failed.");
    }
  } finally {
    asking = null;
    $("ask-send").disabled = false;
    $("ask-stop").disabled = true;
  }
}

// --- start ---

addEventListener("resize", () => {
  paint.size = true;
  redraw();
});
setTheme(stored(localStorage, "chorus-theme") || (prefersDark.matches ? "dark" : "light"));
connect();
