// The page's script: the text and what its tokens read, then one figure for each section.
// Everything comes from the JSON in #data; packed arrays are bytes, compressed, in base64.
"use strict";

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
const number = (x) => (x !== 0 && Math.abs(x) < 0.01 ? x.toExponential(1) : String(+x.toPrecision(4)));

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "rect", "g"].includes(tag);
  const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

async function unpack({ type, data: text }) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const types = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, float32: Float32Array };
  return new types[type](await new Response(stream).arrayBuffer());
}

// replaces all packed arrays in a value
async function unpackAll(value) {
  if (value === null || typeof value !== "object") return value;
  if (typeof value.data === "string" && "type" in value) return unpack(value);
  for (const name of Object.keys(value)) value[name] = await unpackAll(value[name]);
  return value;
}

// a section becomes visible with its first figure
function body(id, className = "") {
  $(id).hidden = false;
  const node = $(id).querySelector(".body");
  node.className = `body ${className}`;
  return node;
}

// arrow keys move within a group of buttons or tokens, of which Tab reaches one
function moveWithArrows(group, columns = () => 1) {
  group.addEventListener("keydown", (event) => {
    const items = [...group.querySelectorAll("[tabindex]")];
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(), ArrowUp: -columns() };
    const ends = { Home: 0, End: items.length - 1 };
    let next = ends[event.key];
    if (event.key in steps) next = items.indexOf(document.activeElement) + steps[event.key];
    if (next === undefined || !items[next]) return;
    event.preventDefault();
    focusOnly(items[next], items);
  });
}

function focusOnly(item, items, focus = true) {
  for (const other of items) if (other.tabIndex === 0) other.tabIndex = -1;
  item.tabIndex = 0;
  if (focus) item.focus();
}

// ---------------------------------------------------------------- the text

const state = { mode: "with", selected: null, layer: null, head: 0 };
let tokens = []; // the spans of the text
let sourceTokens = [];

const written = (text) => (text === "\n" ? "↵" : text.trim() === "" ? "␣" : text.trim());
const symbol = (text) => make("span", { class: "symbol" }, written(text));
const textOf = (index) => (index < 0 ? "\n" : data.vocabulary[data.tokens[index]]);
const prediction = (index, mode = state.mode === "difference" ? "with" : state.mode) => {
  const figures = data.modes[mode];
  return {
    logProb: figures.log_probs[index],
    rank: figures.rank[index],
    likeliest: [...figures.likely.subarray(5 * index, 5 * index + 5)].map((share, i) => ({
      text: data.vocabulary[figures.likeliest[5 * index + i]],
      share,
    })),
  };
};
const bits = (logProb) => -logProb / Math.LN2;

function tokenSpans(container, texts, role) {
  const spans = texts.map((text, index) => {
    const start = role === "option" && data.segment && index > 0 && index % data.segment === 0;
    const attributes = { class: start ? "token start" : "token", role, "data-index": index };
    const span = make("span", attributes, text === "\n" ? "↵\n" : text);
    if (role === "option") span.tabIndex = index === 0 ? 0 : -1;
    return span;
  });
  container.append(...spans);
  return spans;
}

function paint(span, amount, hue) {
  span.style.setProperty("--amount", Math.round(Math.min(1, amount) * 75));
  span.style.setProperty("--hue", `var(--${hue})`);
}

function paintText() {
  sourceTokens.forEach((span) => paint(span, 0, "reads"));
  const table = attentionTable();
  if (state.selected !== null && table) {
    const entries = rowOf(table, state.selected, state.head);
    const largest = Math.max(...entries.map((entry) => entry.weight), 1e-9);
    tokens.forEach((span) => paint(span, 0, "reads"));
    for (const { index, weight } of entries) {
      const span = data.source ? sourceTokens[index] : tokens[state.selected - 1 - index];
      if (span) paint(span, Math.sqrt(weight / largest), "reads");
    }
  } else {
    tokens.forEach((span, index) => {
      if (state.mode !== "difference") return paint(span, bits(prediction(index).logProb) / 12, "loss");
      const gain = bits(prediction(index, "without").logProb) - bits(prediction(index, "with").logProb);
      paint(span, Math.abs(gain) / 4, gain > 0 ? "help" : "harm");
    });
  }
  showLegend(table);
}

function showLegend(table) {
  const scale = (kind) => make("span", { class: `scale ${kind}` });
  const parts = {
    with: [`${data.losses.with}: 0 bits`, scale(""), "12 bits or more"],
    without: [`${data.losses.without ?? ""}, each segment (dotted line) read alone: 0 bits`, scale(""), "12 bits or more"],
    difference: ["the past hurt by 4 bits", scale("difference"), "it helped by 4 bits"],
  }[state.mode];
  const heading = `layer ${state.layer}, head ${state.head + 1}: no weight`;
  const reading = [heading, scale("reads"), "the largest weight. Escape shows the losses again"];
  $("legend").replaceChildren(...(state.selected !== null && table ? reading : parts));
}

// the weights of a token and head: where they point, and how large they are
function rowOf(table, token, head) {
  if (!table.offsets) {
    table.offsets = new Uint32Array(table.counts.length + 1);
    table.counts.forEach((count, row) => (table.offsets[row + 1] = table.offsets[row] + count));
  }
  const row = token * table.heads + head;
  const entries = [];
  for (let i = table.offsets[row]; i < table.offsets[row + 1]; i++) {
    entries.push({ index: table.index[i], weight: table.weight[i] / 255, head });
  }
  return entries.sort((a, b) => b.weight - a.weight);
}

const heads = (table) => Array.from({ length: table.heads }, (_, head) => head);
const attentionTables = () => data.reads.tables.source ?? data.reads.tables.tokens ?? {};
const attentionTable = () => attentionTables()[state.layer];

function showCard(span) {
  const index = +span.dataset.index;
  const { logProb, rank, likeliest } = prediction(index);
  const rows = likeliest.flatMap(({ text, share }) => [symbol(text), bar(share), percent(share)]);
  const summary = `${percent(Math.exp(logProb))}, rank ${rank.toLocaleString("en")}, ${bits(logProb).toFixed(2)} bits`;
  const lines = [make("p", {}, symbol(textOf(index)), " ", make("b", {}, summary))];
  if (data.modes.without) {
    const other = state.mode === "without" ? "with" : "without";
    lines.push(make("p", { class: "note" }, `${other} recurrence: ${percent(Math.exp(prediction(index, other).logProb))}`));
  }
  $("card").replaceChildren(...lines, make("p", { class: "note" }, "likeliest here:"), make("div", { class: "rows" }, ...rows));
  $("card").hidden = false;
  const box = span.getClientRects()[0], card = $("card").getBoundingClientRect();
  const below = box.bottom + 6 + card.height < innerHeight;
  $("card").style.left = `${Math.max(8, Math.min(box.left, innerWidth - card.width - 8))}px`;
  $("card").style.top = `${below ? box.bottom + 6 : Math.max(4, box.top - card.height - 6)}px`;
}

const bar = (share) => make("div", { class: "bar" }, make("i", { style: `width:${Math.min(100, 100 * share)}%` }));

function select(index) {
  if (state.selected !== null) tokens[state.selected].setAttribute("aria-selected", "false");
  state.selected = state.selected === index ? null : index;
  if (state.selected !== null) tokens[index].setAttribute("aria-selected", "true");
  paintText();
  showPanel();
}

function goTo(index) {
  if (state.selected !== index) select(index);
  focusOnly(tokens[index], tokens);
}

// a token with those before it
function context(index) {
  let before = "";
  for (let i = Math.max(0, index - 6); i < index; i++) before += textOf(i).replace("\n", "↵");
  return [make("span", {}, before), symbol(textOf(index))];
}

function showPanel() {
  const panel = $("panel"), { tables } = data.reads;
  const parts = [];
  if (state.selected === null) {
    parts.push(make("h2", {}, "What a token reads"), make("p", { class: "note" }, "Choose a token of the text."));
  } else {
    const { logProb, rank } = prediction(state.selected);
    parts.push(make("h2", {}, "To predict ", symbol(textOf(state.selected))));
    parts.push(make("p", { class: "note" }, `${percent(Math.exp(logProb))}, rank ${rank.toLocaleString("en")}; the text before it ends in “${context(state.selected)[0].textContent}”`));
  }
  if (Object.keys(attentionTables()).length) {
    parts.push(make("h3", {}, data.source ? "Attention from target to source: heads" : "Heads, by their mean distance"), headGrid());
    if (state.selected !== null) parts.push(...attentionList());
  }
  if (state.selected !== null) {
    for (const [layer, table] of Object.entries(tables.vectors ?? {})) {
      if (layer === state.layer || !attentionTable()) {
        parts.push(...users(table, 6, `Persistent vectors, layer ${layer}`, "vector", true));
      }
    }
    for (const [layer, table] of Object.entries(tables.slots ?? {})) {
      parts.push(...users(table, 10, `Slots of the memory in layer ${layer}`, "slot", false));
    }
  }
  panel.replaceChildren(...parts);
}

function attentionList() {
  const entries = rowOf(attentionTable(), state.selected, state.head);
  const sum = entries.reduce((total, { weight }) => total + weight, 0);
  const rows = entries.slice(0, 8).flatMap(({ index, weight }) => {
    const text = data.source ? data.source[index] : textOf(state.selected - 1 - index);
    const where = data.source ? "" : ` distance ${index}`;
    return [make("span", {}, symbol(text), make("span", { class: "note" }, where)), bar(weight), percent(weight)];
  });
  const rest = `${entries.length} weights are in this page, ${percent(Math.min(1, sum))} of the head's attention`;
  return [make("h3", {}, `Layer ${state.layer}, head ${state.head + 1} read`), make("div", { class: "rows", id: "read" }, ...rows), make("p", { class: "note" }, rest)];
}

// the strongest vectors or slots of the token, each with the tokens that use it most
function users(table, most, title, name, byHead) {
  const all = heads(table).flatMap((head) => rowOf(table, state.selected, head));
  const entries = all.sort((a, b) => b.weight - a.weight).slice(0, most);
  const details = entries.map(({ index, head, weight }) => {
    const label = `${name} ${index}, head ${head + 1}`;
    const node = make("details", {}, make("summary", {}, make("div", { class: "rows" }, label, bar(weight), percent(weight))));
    node.addEventListener("toggle", () => {
      if (node.children.length > 1) return;
      const uses = tokens.flatMap((_, token) => (byHead ? [head] : heads(table))
        .flatMap((other) => rowOf(table, token, other).filter((entry) => entry.index === index))
        .map((entry) => ({ token, weight: entry.weight })));
      const others = uses.filter(({ token }) => token !== state.selected).sort((a, b) => b.weight - a.weight).slice(0, 8);
      if (!others.length) node.append(make("p", { class: "note" }, "no other token of this text"));
      for (const { token, weight: share } of others) {
        node.append(make("button", { type: "button", onclick: () => goTo(token) }, ...context(token), ` ${percent(share)}`));
      }
    });
    return node;
  });
  return [make("h3", {}, title), ...details];
}

function headGrid() {
  const tables = attentionTables();
  const columns = Math.max(...Object.values(tables).map((table) => table.heads));
  const grid = make("div", { class: "heads", role: "radiogroup", "aria-label": "layer and head", style: `grid-template-columns:auto repeat(${columns},minmax(14px,1fr))` });
  for (const [layer, table] of Object.entries(tables)) {
    grid.append(make("span", { title: `layer ${layer}` }, layer));
    for (const head of heads(table)) {
      const mean = data.reads.distances[layer]?.mean[head];
      const longest = data.reads.distances[layer]?.longest ?? 1;
      const checked = layer === state.layer && head === state.head;
      const title = `layer ${layer}, head ${head + 1}` + (mean === undefined ? "" : `: mean distance ${mean.toFixed(1)}`);
      const label = mean === undefined ? `${head + 1}` : mean.toFixed(mean < 10 && columns < 9 ? 1 : 0);
      const attributes = { type: "button", role: "radio", "aria-checked": checked, "aria-label": title, title, tabindex: checked ? 0 : -1 };
      const cell = make("button", { ...attributes, onclick: () => chooseHead(layer, head, true) }, label);
      cell.style.setProperty("--amount", mean === undefined ? 12 : Math.round((65 * Math.log1p(mean)) / Math.log1p(longest)));
      grid.append(cell);
    }
    for (let head = table.heads; head < columns; head++) grid.append(make("span"));
  }
  moveWithArrows(grid, () => columns);
  return grid;
}

function chooseHead(layer, head, focus = false) {
  Object.assign(state, { layer, head });
  paintText();
  showPanel();
  if (focus) $("panel").querySelector('[aria-checked="true"]').focus();
  showHead();
}

function showText() {
  $("text").hidden = false;
  if (data.source) {
    $("source").hidden = false;
    sourceTokens = tokenSpans($("source"), data.source, "presentation");
  }
  tokens = tokenSpans($("tokens"), [...data.tokens].map((id) => data.vocabulary[id]), "option");
  const modes = data.modes.without ? { with: "on", without: "off", difference: "difference" } : {};
  for (const [mode, label] of Object.entries(modes)) {
    const change = () => { state.mode = mode; state.selected === null ? paintText() : select(state.selected); };
    const input = make("input", { type: "radio", name: "mode", value: mode, checked: mode === "with" ? "" : null, onchange: change });
    $("modes").append(make("label", {}, input, ` ${label}`));
  }
  $("modes").hidden = !data.modes.without;
  const tokenOf = (event) => event.target.closest("[role=option]");
  const hide = () => ($("card").hidden = true);
  $("tokens").addEventListener("mouseover", (event) => tokenOf(event) && showCard(tokenOf(event)));
  $("tokens").addEventListener("focusin", (event) => tokenOf(event) && showCard(tokenOf(event)));
  for (const leaving of ["mouseleave", "focusout", "scroll"]) $("tokens").addEventListener(leaving, hide);
  $("tokens").addEventListener("click", (event) => {
    if (!tokenOf(event)) return;
    focusOnly(tokenOf(event), tokens, false);
    select(+tokenOf(event).dataset.index);
  });
  $("tokens").addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); select(+tokenOf(event).dataset.index); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    hide();
    if (state.selected !== null) select(state.selected);
  });
  moveWithArrows($("tokens"), () => {
    // the token below: the first one as far right, a line further
    return 12;
  });
  const candidates = Object.entries(attentionTables()).flatMap(([layer, table]) => heads(table).map((head) => ({ layer, head, mean: data.reads.distances[layer]?.mean[head] ?? 0 })));
  const farthest = candidates.sort((a, b) => b.mean - a.mean)[0];
  if (farthest) Object.assign(state, { layer: farthest.layer, head: farthest.head });
  paintText();
  showPanel();
}

// ---------------------------------------------------------------- figures

function ticks(least, most, log) {
  if (log) {
    const powers = [];
    for (let p = Math.ceil(Math.log10(least) - 1e-9); p <= Math.log10(most) + 1e-9; p++) powers.push(10 ** p);
    if (powers.length > 1) return powers;
  }
  const rough = (most - least) / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const values = [];
  for (let x = Math.ceil(least / step - 1e-9) * step; x <= most + step * 1e-9; x += step) values.push(+x.toPrecision(12));
  return values.filter((x) => !log || x > 0);
}

const colour = (i) => `var(--series-${i % 8})`;
const dash = (i) => ["", "6 3", "2 3", "8 3 2 3"][Math.floor(i / 8) % 4];

// series: {name, x, y, colour, faint}; pointing at the chart shows the values there
function lineChart({ title, series, xLabel, yLabel, xLog = false, yLog = false, y: range }) {
  const [width, height, left, bottom] = [460, 270, 52, 40];
  const shown = series.map((s) => ({ ...s, points: s.x.map((x, i) => [x, s.y[i]]).filter(([x, y]) => (!xLog || x > 0) && (!yLog || y > 0)) })).filter((s) => s.points.length);
  const all = shown.flatMap((s) => s.points);
  const [x0, x1] = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
  const [y0, y1] = range ?? [Math.min(...all.map((p) => p[1])), Math.max(...all.map((p) => p[1]))];
  const place = (v, a, b, log) => (a === b ? 0.5 : log ? Math.log(v / a) / Math.log(b / a) : (v - a) / (b - a));
  const px = (x) => left + place(x, x0, x1, xLog) * (width - left - 8);
  const py = (y) => height - bottom - place(y, y0, y1, yLog) * (height - bottom - 10);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${yLabel} by ${xLabel}` });
  for (const y of ticks(y0, y1, yLog)) {
    svg.append(make("line", { class: "grid", x1: left, x2: width - 8, y1: py(y), y2: py(y) }));
    svg.append(make("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, number(y)));
  }
  for (const x of ticks(x0, x1, xLog)) svg.append(make("text", { x: px(x), y: height - bottom + 16, "text-anchor": "middle" }, number(x)));
  svg.append(make("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, xLabel));
  for (const s of shown) {
    const path = s.points.map(([x, y], i) => `${i ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
    svg.append(make("path", { class: s.faint ? "line faint" : "line", d: s.points.length > 1 ? path : `${path}h0.1`, stroke: colour(s.colour), "stroke-dasharray": dash(s.colour), "stroke-linecap": "round" }));
  }
  const rule = make("line", { class: "grid", y1: 10, y2: height - bottom, visibility: "hidden" });
  const caption = make("figcaption", {}, make("b", {}, title), ` · ${yLabel}`);
  const plain = [...caption.childNodes];
  svg.append(rule);
  svg.addEventListener("pointermove", (event) => {
    const at = ((event.clientX - svg.getBoundingClientRect().left) / svg.getBoundingClientRect().width) * width;
    const near = shown.filter((s) => !s.faint).map((s) => [s, s.points.reduce((a, b) => (Math.abs(px(b[0]) - at) < Math.abs(px(a[0]) - at) ? b : a))]);
    const x = near[0][1][0];
    rule.setAttribute("x1", px(x)); rule.setAttribute("x2", px(x)); rule.setAttribute("visibility", "visible");
    caption.replaceChildren(make("b", {}, `${xLabel} ${number(x)}`), `: ${near.slice(0, 8).map(([s, point]) => `${s.name} ${number(point[1])}`).join(", ")}`);
  });
  svg.addEventListener("pointerleave", () => { rule.setAttribute("visibility", "hidden"); caption.replaceChildren(...plain); });
  const key = shown.filter((s) => !s.faint).map((s) => make("span", {}, make("i", { style: `border-color:${colour(s.colour)};border-top-style:${dash(s.colour) ? "dashed" : "solid"}` }), s.name));
  return make("figure", {}, caption, svg, ...(key.length > 1 ? [make("div", { class: "key" }, ...key)] : []));
}

// columns from 0 to `most`, with a dashed line
function columns(title, values, names, most, line = null) {
  const bars = values.map((value, i) => make("i", { style: `height:${Math.max(0.5, (100 * value) / most)}%`, title: `${names(i)}: ${number(value)}` }));
  if (line !== null) bars.push(make("u", { style: `bottom:${(100 * line) / most}%` }));
  const label = `${title}: ${values.map((value, i) => `${names(i)} ${number(value)}`).join(", ")}`;
  return make("figure", { role: "img", "aria-label": label }, make("div", { class: "columns" }, ...bars), make("figcaption", {}, title));
}

const redraw = []; // what to draw again in other colours

function showDistances() {
  const layers = Object.entries(data.reads.distances);
  if (!layers.length) return;
  const longest = Math.max(...layers.map(([, d]) => d.longest)), bins = Math.min(longest, 320);
  const rows = layers.flatMap(([layer, d]) => d.mean.map((_, head) => ({ layer, head, weights: d.weight.subarray(head * d.longest, (head + 1) * d.longest) })));
  const canvas = make("canvas", { width: bins, height: rows.length * 4, role: "img", "aria-label": "mean attention by head and distance", style: `height:${Math.max(120, rows.length * Math.max(4, Math.min(14, 480 / rows.length)))}px` });
  const caption = make("figcaption");
  const start = (bin) => Math.floor((bin * longest) / bins);
  const weightIn = (row, bin) => Math.max(0, ...row.weights.subarray(start(bin), Math.max(start(bin) + 1, start(bin + 1))));
  const draw = () => {
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, bins, canvas.height);
    pen.fillStyle = getComputedStyle(canvas).color;
    rows.forEach((row, y) => {
      const largest = Math.max(...row.weights);
      for (let bin = 0; bin < bins; bin++) {
        pen.globalAlpha = Math.max(0, 1 + Math.log10(weightIn(row, bin) / largest + 1e-12) / 3);
        pen.fillRect(bin, y * 4, 1, row.layer !== rows[y + 1]?.layer ? 3 : 4);
      }
    });
  };
  redraw.push(draw);
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    const row = rows[Math.min(rows.length - 1, Math.floor(((event.clientY - box.top) / box.height) * rows.length))];
    return { row, bin: Math.min(bins - 1, Math.floor(((event.clientX - box.left) / box.width) * bins)) };
  };
  const idle = `${rows.length} heads, layer 1 above; distance 0 to ${longest - 1} from left to right`;
  caption.textContent = idle;
  canvas.addEventListener("pointermove", (event) => {
    const { row, bin } = at(event);
    caption.textContent = `layer ${row.layer}, head ${row.head + 1}, distance ${start(bin)}: ${percent(weightIn(row, bin))}`;
  });
  canvas.addEventListener("pointerleave", () => (caption.textContent = idle));
  canvas.addEventListener("click", (event) => chooseHead(at(event).row.layer, at(event).row.head));
  body("distances", "charts").append(make("figure", {}, caption, canvas), make("div", { id: "head-chart" }));
  draw();
  showHead();
}

function showHead() {
  const distances = data.reads.distances[state.layer];
  if (!distances || !$("head-chart")) return;
  const y = [...distances.weight.subarray(state.head * distances.longest, (state.head + 1) * distances.longest)];
  const series = [{ name: "weight", x: y.map((_, i) => i + 1), y, colour: 0 }];
  $("head-chart").replaceChildren(lineChart({ title: `layer ${state.layer}, head ${state.head + 1}`, series, xLabel: "distance + 1", yLabel: "mean weight", xLog: true, yLog: true }));
}

function showSpans() {
  if (!data.spans.length) return;
  const figure = body("spans", "groups"), most = Math.max(...data.spans.flatMap((s) => s.spans.map((z) => z + s.ramp)));
  for (const { layer, spans, ramp, largest } of data.spans) {
    const tokens = spans.map((z) => Math.min(largest, z + ramp)), mean = tokens.reduce((a, b) => a + b) / tokens.length;
    const group = columns(`layer ${layer}: mean ${Math.round(mean).toLocaleString("en")}, largest ${Math.round(Math.max(...tokens)).toLocaleString("en")} tokens`, tokens, (i) => `head ${i + 1}, ${number(spans[i])} in full`, most);
    group.querySelectorAll("i").forEach((node, i) => {
      const solid = (100 * Math.min(spans[i], tokens[i])) / tokens[i];
      node.style.background = `linear-gradient(to top, var(--accent) ${solid}%, color-mix(in srgb, var(--accent) 12%, transparent))`;
    });
    figure.append(group);
  }
}

function showPersistent() {
  for (const [layer, shares] of Object.entries(data.reads.shares)) {
    const mean = shares.reduce((a, b) => a + b) / shares.length;
    body("persistent", "groups").append(columns(`layer ${layer}: ${percent(mean)}`, shares, (i) => `head ${i + 1}`, 1));
  }
}

function showMemories() {
  for (const [name, memory] of Object.entries(data.reads.memories)) {
    const label = name.replace("decoder", data.source ? "decoder layer" : "layer").replace("encoder", "encoder layer");
    const rows = [["all heads", memory.usage, memory.kl], ...memory.heads.map(([usage, kl], i) => [`head ${i + 1}`, usage, kl])];
    const cells = rows.map(([head, usage, kl]) => make("tr", {}, make("td", {}, head), make("td", {}, percent(usage)), make("td", {}, kl.toFixed(2))));
    const head = make("tr", {}, make("th", {}, `${label}, ${memory.slots.toLocaleString("en")} slots`), make("th", {}, "usage"), make("th", {}, "KL, nats"));
    const series = memory.curves.map((curve, i) => ({ name: i ? `head ${i}` : "all heads", ...curve, colour: i }));
    body("memory", "charts").append(make("table", {}, head, ...cells), lineChart({ title: label, series, xLabel: "slots, the most read first", yLabel: "share of the reads", xLog: true, yLog: true }));
  }
}

function showBranches() {
  for (const { layer, kind, weights } of data.branches) {
    const name = { kappa: "κ", alpha: "α" }[kind] ?? kind, most = Math.max(...data.branches.flatMap((row) => row.weights));
    body("branches", "groups").append(columns(`${name}, ${layer}`, weights, (i) => `branch ${i + 1}`, most, 1 / weights.length));
  }
}

function showCurves(by = "updates") {
  if (!data.logs.length) return;
  const perplexity = data.unit === "perplexity", inUnit = (loss) => (perplexity ? 2 ** loss : loss);
  const place = body("curves"), several = data.logs.length > 1;
  const series = data.logs.flatMap((log, i) => [
    { name: several ? log.label : "training", x: log.training[by], y: log.training.y.map(inUnit), colour: i, faint: true },
    { name: several ? log.label : "validation", x: log.validation[by], y: log.validation.y.map(inUnit), colour: i },
  ]);
  const charts = [lineChart({ title: "Loss", series, xLabel: by, yLabel: data.unit, yLog: perplexity })];
  const titles = [...new Set(data.logs.flatMap((log) => log.figures.map((figure) => figure.title)))];
  for (const title of titles) {
    const lines = data.logs.flatMap((log) => log.figures.filter((figure) => figure.title === title).map((figure) => ({ ...figure, name: several ? `${log.label}, ${figure.name}` : figure.name, x: figure[by] })));
    charts.push(lineChart({ title: title.split(", ")[0], series: lines.map((line, i) => ({ ...line, colour: i })), xLabel: by, yLabel: title.split(", ")[1] ?? "weight" }));
  }
  const choices = ["updates", "minutes"].map((name) => {
    const input = make("input", { type: "radio", name: "by", checked: name === by ? "" : null, onchange: () => { showCurves(name); $("curves").querySelector("input:checked").focus(); } });
    return make("label", {}, input, ` ${name}`);
  });
  place.replaceChildren(make("fieldset", {}, make("legend", {}, "by"), ...choices), make("div", { class: charts.length > 1 ? "charts" : "charts one" }, ...charts));
}

function setUpTheme() {
  const media = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
  const dark = () => (root.style.colorScheme || (media.matches ? "dark" : "light")) === "dark";
  const update = () => { $("theme").textContent = dark() ? "Light" : "Dark"; redraw.forEach((draw) => draw()); };
  $("theme").addEventListener("click", () => { root.style.colorScheme = dark() ? "light" : "dark"; update(); });
  media.addEventListener("change", update);
  update();
}

async function show() {
  await unpackAll(data);
  if (data.tokens) for (const part of [showText, showDistances, showSpans, showPersistent, showMemories, showBranches]) part();
  showCurves();
  setUpTheme();
  const figure = new URLSearchParams(location.search).get("figure");
  if (figure) {
    // one figure alone, and its height, for --picture
    document.body.classList.add("picture");
    for (const section of document.querySelectorAll("section")) if (section.id !== figure) section.hidden = true;
    if (!$(figure).hidden) document.documentElement.dataset.height = Math.ceil(document.body.getBoundingClientRect().height);
  }
  document.documentElement.dataset.ready = "";
}

show();
