// The page's script: the text and what its tokens read, then the figures that are drawn.
// All data are in the JSON in #data; its packed arrays are bytes, compressed, in base64.
"use strict";

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const percent = (share) => (share < 0.0005 ? "< 0.1 %" : `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`);
const number = (x) => (x !== 0 && Math.abs(x) < 0.001 ? x.toExponential(0) : (+x.toPrecision(4)).toLocaleString("en"));
const range = (length) => Array.from({ length }, (_, i) => i);
const capped = (x) => Math.min(1, Math.max(0, x));

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const name in attributes) node.setAttribute(name, attributes[name]);
  node.append(...children);
  return node;
}

async function unpack({ type, data: text }) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const types = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, float32: Float32Array };
  return new types[type](await new Response(stream).arrayBuffer());
}

async function unpackAll(value) {
  if (value?.type && value.data) return unpack(value);
  if (typeof value === "object") for (const name in value) value[name] = await unpackAll(value[name]);
  return value;
}

// Tab reaches one item of a group, arrow keys reach the others.
function moveWithArrows(group) {
  group.addEventListener("keydown", (event) => {
    const items = [...group.querySelectorAll("[tabindex]")];
    const next = neighbour(items, document.activeElement, event.key);
    if (!next) return;
    event.preventDefault();
    focusOnly(next, items);
    next.focus();
  });
}

function neighbour(items, item, key) {
  const at = items.indexOf(item);
  const direct = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: items.length - 1 };
  if (key in direct) return items[direct[key]];
  if (key !== "ArrowUp" && key !== "ArrowDown") return undefined;
  // the nearest item of the next line
  const [side, way] = key === "ArrowUp" ? [items.slice(0, at).reverse(), -1] : [items.slice(at + 1), 1];
  const place = (node) => node.getClientRects()[0], from = place(item);
  const below = side.filter((node) => way * (place(node).top - from.top) > 4);
  const line = below.filter((node) => Math.abs(place(node).top - place(below[0]).top) < 4);
  return line.sort((a, b) => Math.abs(place(a).left - from.left) - Math.abs(place(b).left - from.left))[0];
}

const focusOnly = (item, items) => items.forEach((other) => (other.tabIndex = other === item ? 0 : -1));

const state = { mode: "with", selected: null, layer: null, head: 0 };
let tokens = [], source = []; // elements
const attention = () => data.reads.tables.source ?? data.reads.tables.tokens ?? {};
const written = (text) => (text === "\n" ? "↵" : text.trim() || "␣");
const symbol = (text) => make("span", { class: "symbol" }, written(text));
// before the text there is a line end, and before a window of it more text
const textOf = (index) => (index < 0 ? (data.start ? "…" : "\n") : data.vocabulary[data.tokens[index]]);
const before = (index) => range(index).slice(-6).map((i) => textOf(i).replace("\n", " ↵ ")).join("");
const bits = (index, mode) => -data.modes[mode].log_probs[index] / Math.LN2;
const probability = (index, mode) => Math.exp(data.modes[mode].log_probs[index]);
const modeShown = () => (state.mode === "difference" ? "with" : state.mode);
const describe = (index, mode = modeShown()) =>
  `${percent(probability(index, mode))}, rank ${number(data.modes[mode].rank[index])}, ${bits(index, mode).toFixed(2)} bits`;
const bar = (share) => make("div", { class: "bar" }, make("i", { style: `width:${100 * capped(share)}%` }));
const note = (...content) => make("p", { class: "note" }, ...content);

function tokenElements(container, texts, role) {
  const elements = texts.map((text, index) => {
    const start = role === "option" && index > 0 && index % data.segment === 0 ? " start" : "";
    return make("span", { role, class: `token${start}`, "data-index": index }, text === "\n" ? "↵\n" : text);
  });
  container.append(...elements);
  return elements;
}

function paint(element, amount, hue) {
  element.style.cssText = `--amount:${Math.round(75 * capped(amount))};--hue:var(--${hue})`;
}

function paintText() {
  const table = state.selected === null ? null : attention()[state.layer];
  [...source, ...tokens].forEach((element) => paint(element, 0, "reads"));
  if (table) {
    const entries = rowOf(table, state.selected, state.head);
    for (const { index, weight } of entries) {
      const element = data.source ? source[index] : tokens[state.selected - 1 - index];
      if (element) paint(element, Math.sqrt(weight / entries[0].weight), "reads");
    }
  } else if (state.mode === "difference") {
    tokens.forEach((element, i) => {
      const gain = bits(i, "without") - bits(i, "with");
      paint(element, Math.abs(gain) / 4, gain > 0 ? "help" : "harm");
    });
  } else tokens.forEach((element, i) => paint(element, bits(i, state.mode) / 12, "loss"));
  const scale = (kind) => make("span", { class: `scale ${kind}` });
  const ends = table
    ? [`layer ${state.layer}, head ${state.head + 1}: no weight`, scale("reads"), "the largest; Escape shows losses"]
    : state.mode === "difference"
      ? ["the past hurt by 4 bits or more", scale("difference"), "it helped by 4 bits or more"]
      : [`${data.losses[state.mode]}; a token's loss: 0 bits`, scale(""), "12 bits or more"];
  $("legend").replaceChildren(...ends);
}

// the weights of a token and head, largest first: where they point, and how large they are
function rowOf(table, token, head) {
  if (!table.offsets) {
    table.offsets = [0];
    for (const count of table.counts) table.offsets.push(table.offsets.at(-1) + count);
  }
  const row = token * table.heads + head;
  const entries = [];
  for (let i = table.offsets[row]; i < table.offsets[row + 1]; i++) {
    entries.push({ index: table.index[i], weight: table.weight[i] / 255, head });
  }
  return entries.sort((a, b) => b.weight - a.weight);
}

function showCard(element) {
  const index = +element.dataset.index, mode = modeShown(), figures = data.modes[mode];
  const rows = range(5).map((i) => 5 * index + i).flatMap((i) =>
    [symbol(data.vocabulary[figures.likeliest[i]]), bar(figures.likely[i]), percent(figures.likely[i])]);
  const other = mode === "with" ? "without" : "with";
  const comparison = data.modes[other] ? [note(`${other} recurrence: ${percent(probability(index, other))}`)] : [];
  $("card").replaceChildren(
    make("p", {}, symbol(textOf(index)), " ", make("b", {}, describe(index))),
    ...comparison, note("likeliest here:"), make("div", { class: "rows" }, ...rows),
  );
  $("card").hidden = false;
  const box = element.getClientRects()[0], card = $("card").getBoundingClientRect();
  const top = box.bottom + card.height + 6 < innerHeight ? box.bottom + 6 : box.top - card.height - 6;
  $("card").style.top = `${Math.max(4, top)}px`;
  $("card").style.left = `${Math.max(8, Math.min(box.left, innerWidth - card.width - 8))}px`;
}

function select(index) {
  tokens[state.selected]?.setAttribute("aria-selected", "false");
  tokens[index]?.setAttribute("aria-selected", "true");
  state.selected = index;
  if (index !== null) focusOnly(tokens[index], tokens);
  paintText();
  showPanel();
}

function showPanel() {
  const { vectors = {}, slots = {} } = data.reads.tables, at = state.selected;
  const parts = at === null
    ? [make("h2", {}, "What a token read"), note("Choose a token of the text, such as one of these:"), ...remarkable()]
    : [make("h2", {}, "To predict ", symbol(textOf(at))), note(`${describe(at)}, after “…${before(at)}”`)];
  const reads = (tables, act) => Object.entries(at === null ? {} : tables).forEach(([layer, table]) => parts.push(...act(table, layer)));
  if (Object.keys(attention()).length) {
    parts.push(make("h3", {}, data.source ? "Layers and heads" : "Layers and heads, by mean distance"), headGrid());
    if (at !== null) parts.push(...attentionList());
  }
  reads(vectors, (table, layer) => (layer === state.layer ? users(table, 6, `Persistent vectors of layer ${layer}`, "vector") : []));
  reads(slots, (table, layer) => users(table, 10, `Slots of the memory in layer ${layer}`, "slot"));
  $("panel").replaceChildren(...parts);
}

function attentionList() {
  const entries = rowOf(attention()[state.layer], state.selected, state.head);
  const rows = entries.slice(0, 8).flatMap(({ index, weight }) => {
    const text = data.source ? data.source[index] : textOf(state.selected - 1 - index);
    const where = make("span", { class: "note" }, data.source ? "" : ` distance ${index}`);
    return [make("span", {}, symbol(text), where), bar(weight), percent(weight)];
  });
  const sum = entries.reduce((total, { weight }) => total + weight, 0);
  const heading = make("h3", {}, `Tokens that layer ${state.layer}, head ${state.head + 1} read`), list = { class: "rows", id: "read" };
  return [heading, make("div", list, ...rows), note(`The page keeps large weights: here ${percent(capped(sum))} of this head's attention.`)];
}

// the strongest vectors or slots of the token, each with the tokens that use it most
function users(table, most, title, name) {
  const entries = range(table.heads).flatMap((head) => rowOf(table, state.selected, head));
  const details = entries.sort((a, b) => b.weight - a.weight).slice(0, most).map(({ index, head, weight }) => {
    const label = make("span", {}, `${name} ${index}, head ${head + 1}`);
    const node = make("details", {}, make("summary", {}, make("div", { class: "rows" }, label, bar(weight), percent(weight))));
    // the heads of a memory share its slots, each head has its own vectors
    const sharing = name === "slot" ? range(table.heads) : [head];
    node.addEventListener("toggle", () => node.children.length > 1 || node.append(...otherUsers(table, sharing, index)));
    return node;
  });
  return [make("h3", {}, title), ...details];
}

function otherUsers(table, heads, index) {
  const uses = tokens.flatMap((_, token) => heads.flatMap((head) =>
    rowOf(table, token, head).filter((entry) => entry.index === index && token !== state.selected)
      .map(({ weight }) => ({ token, weight }))));
  const best = uses.sort((a, b) => b.weight - a.weight).slice(0, 8).map(({ token, weight }) => choice(token, percent(weight)));
  return best.length ? best : [note("No other token of this text.")];
}

function choice(token, figure) {
  const button = make("button", { type: "button", class: "choice" }, before(token), symbol(textOf(token)), ` ${figure}`);
  button.onclick = () => { select(token); tokens[token].focus(); };
  return button;
}

// the tokens that the chosen mode colours most
function remarkable() {
  const amount = (i) => (state.mode === "difference" ? bits(i, "without") - bits(i, "with") : bits(i, state.mode));
  return range(tokens.length).sort((a, b) => amount(b) - amount(a)).slice(0, 6).map((i) => choice(i, `${amount(i).toFixed(1)} bits`));
}

function headGrid() {
  const most = Math.max(...Object.values(attention()).map((table) => table.heads));
  const style = `grid-template-columns:auto repeat(${most},minmax(14px,1fr))`;
  const grid = make("div", { class: "heads", role: "radiogroup", "aria-label": "layer and head", style });
  for (const [layer, table] of Object.entries(attention())) {
    grid.append(make("span", {}, layer));
    const distances = data.reads.distances[layer];
    for (const head of range(table.heads)) {
      const mean = distances?.mean[head], checked = layer === state.layer && head === state.head;
      const title = `layer ${layer}, head ${head + 1}${distances ? `: mean distance ${mean.toFixed(1)}` : ""}`;
      const attributes = { title, "aria-label": title, "aria-checked": checked, tabindex: checked ? 0 : -1 };
      const text = distances ? mean.toFixed(mean < 10 && most < 9 ? 1 : 0) : head + 1;
      const cell = make("button", { type: "button", role: "radio", ...attributes }, text);
      cell.style.setProperty("--amount", distances ? 65 * Math.log1p(mean) / Math.log1p(distances.longest) : 12);
      cell.onclick = () => { chooseHead(layer, head); $("panel").querySelector('[aria-checked="true"]').focus(); };
      if (head === 0) cell.style.gridColumnStart = 2;
      grid.append(cell);
    }
  }
  moveWithArrows(grid);
  return grid;
}

function chooseHead(layer, head) {
  Object.assign(state, { layer, head });
  paintText();
  showPanel();
  showHead();
}

function showText() {
  if (data.source) source = tokenElements($("source"), data.source, "presentation");
  tokens = tokenElements($("tokens"), [...data.tokens].map((id) => data.vocabulary[id]), "option");
  focusOnly(tokens[0], tokens);
  moveWithArrows($("tokens"));
  $("modes")?.addEventListener("change", (event) => { state.mode = event.target.value; select(null); });
  const on = (names, act) => names.split(" ").forEach((name) =>
    $("tokens").addEventListener(name, (event) => event.target.matches(".token") && act(event.target, event)));
  const toggle = ({ dataset }) => select(state.selected === +dataset.index ? null : +dataset.index);
  const hide = () => ($("card").hidden = true);
  on("mouseover focusin", showCard);
  on("mouseout focusout", hide);
  on("click", toggle);
  on("keydown", (element, event) => event.key === "Enter" && toggle(element));
  document.addEventListener("keydown", (event) => event.key === "Escape" && (hide(), select(null)));
  select(null);
  chooseHead(...data.reads.first);
}

function ticks(least, most, log) {
  const powers = range(40).map((i) => 10 ** (i - 20)).filter((x) => x >= least * 0.999 && x <= most * 1.001);
  if (log && powers.length > 1) return powers;
  const rough = (most - least) / 4 || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  return range(12).map((i) => step * (Math.ceil(least / step - 1e-9) + i)).filter((x) => x <= most + 1e-9 * step && (x > 0 || !log));
}

// a caption that says what is under the pointer
function readout(target, caption, idle, describeAt) {
  const rest = () => caption.replaceChildren(...idle);
  target.addEventListener("pointermove", (event) => caption.replaceChildren(...describeAt(event)));
  target.addEventListener("pointerleave", rest);
  rest();
}

// `series` have name, x, y, colour and faint; pointing at the chart shows the values there
function lineChart({ title, series, xLabel, yLabel, xLog, yLog, width }) {
  const height = 270, left = 56, right = width - 14, low = height - 40, high = 10;
  const seen = ([x, y]) => (!xLog || x > 0) && (!yLog || y > 0);
  const lines = series.map((line) => ({ ...line, points: line.x.map((x, i) => [x, line.y[i]]).filter(seen) }))
    .filter(({ points }) => points.length);
  const scale = (axis, log, from, to) => {
    const values = lines.flatMap(({ points }) => points.map((point) => point[axis])), bend = log ? Math.log : (x) => x;
    const [a, b] = [Math.min(...values), Math.max(...values)];
    return [(x) => (a === b ? (from + to) / 2 : from + ((bend(x) - bend(a)) / (bend(b) - bend(a))) * (to - from)), ticks(a, b, log)];
  };
  const [px, xTicks] = scale(0, xLog, left, right), [py, yTicks] = scale(1, yLog, low, high);
  const dashes = (colour) => ["", "6 3", "2 3"][Math.floor(colour / 8) % 3];
  const stroke = ({ colour }) => ({ stroke: `var(--series-${colour % 8})`, "stroke-dasharray": dashes(colour) });
  const rule = make("line", { class: "grid", y1: high, y2: low, visibility: "hidden" });
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${yLabel} by ${xLabel}` },
    ...yTicks.map((y) => make("line", { class: "grid", x1: left, x2: right, y1: py(y), y2: py(y) })),
    ...yTicks.map((y) => make("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, number(y))),
    ...xTicks.map((x) => make("text", { x: px(x), y: low + 16, "text-anchor": "middle" }, number(x))),
    make("text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, xLabel),
    ...lines.map((line) => make("path", {
      class: line.faint ? "line faint" : "line", ...stroke(line),
      d: line.points.map(([x, y], i) => `${i ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("") + "h0.1",
    })), rule);
  const caption = make("figcaption");
  readout(svg, caption, [make("b", {}, title), ` · ${yLabel}`], (event) => {
    const box = svg.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * width;
    const nearest = ({ points }) => points.reduce((a, b) => (Math.abs(px(b[0]) - at) < Math.abs(px(a[0]) - at) ? b : a));
    const thick = lines.filter(({ faint }) => !faint).slice(0, 8), [x] = nearest(thick[0]);
    for (const [name, value] of Object.entries({ x1: px(x), x2: px(x), visibility: "visible" })) rule.setAttribute(name, value);
    return [make("b", {}, `${xLabel} ${number(x)}`), `: ${thick.map((line) => `${line.name} ${number(nearest(line)[1])}`).join(", ")}`];
  });
  svg.addEventListener("pointerleave", () => rule.setAttribute("visibility", "hidden"));
  const sample = (line) => make("svg", { viewBox: "0 0 20 6" }, make("path", { class: "line", d: "M0 3h20", ...stroke(line) }));
  const names = lines.filter(({ faint }) => !faint).map((line) => make("span", {}, sample(line), line.name));
  return make("figure", {}, caption, svg, ...(names.length > 1 ? [make("div", { class: "key" }, ...names)] : []));
}

function showDistances() {
  const rows = Object.entries(data.reads.distances).flatMap(([layer, { mean, longest, weight }]) =>
    mean.map((_, head) => ({ layer, head, weights: weight.subarray(head * longest, (head + 1) * longest) })));
  const longest = Math.max(...rows.map(({ weights }) => weights.length));
  const canvas = $("distances").querySelector("canvas");
  Object.assign(canvas, { width: longest, height: 4 * rows.length });
  canvas.style.height = `${Math.max(230, 5 * rows.length)}px`;
  canvas.style.imageRendering = longest < 600 ? "pixelated" : "auto";
  const at = ({ clientX, clientY }) => {
    const box = canvas.getBoundingClientRect(), place = (share, length) => Math.floor(capped(share) * (length - 0.01));
    return [rows[place((clientY - box.top) / box.height, rows.length)], place((clientX - box.left) / box.width, longest)];
  };
  readout(canvas, $("distances").querySelector("figcaption"),
    [`${rows.length} heads from top to bottom, distance 0 to ${longest - 1} from left to right`], (event) => {
      const [{ layer, head, weights }, distance] = at(event);
      return [`layer ${layer}, head ${head + 1}, distance ${distance}: ${percent(weights[distance] ?? 0)}`];
    });
  canvas.addEventListener("click", (event) => chooseHead(at(event)[0].layer, at(event)[0].head));
  return () => { // once more in the colours of another theme
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.fillStyle = getComputedStyle(canvas).color;
    rows.forEach(({ layer, weights }, y) => {
      const largest = Math.max(...weights);
      weights.forEach((weight, distance) => {
        pen.globalAlpha = capped(1 + Math.log10(weight / largest) / 3);
        pen.fillRect(distance, 4 * y, 1, layer === rows[y + 1]?.layer ? 4 : 3);
      });
    });
  };
}

// attention in one layer and head: a row for each token that reads, a column for each source token
function showMatrix(place, table, head, texts) {
  const rows = texts.map((text, token) => {
    const cells = data.source.map((other) => make("td", { title: `${written(text)} → ${written(other)}` }));
    rowOf(table, token, head).forEach(({ index, weight }) => {
      paint(cells[index], weight, "reads");
      cells[index].title += `: ${percent(weight)}`;
    });
    return make("tr", {}, make("th", {}, written(text)), ...cells);
  });
  const names = data.source.map((text) => make("th", {}, make("span", {}, written(text))));
  place.replaceChildren(make("tr", {}, make("th"), ...names), ...rows);
}

function showEncoder() {
  const heads = Object.entries(data.reads.tables.encoder).flatMap(([layer, table]) =>
    range(table.heads).map((head) => ({ label: `layer ${layer}, head ${head + 1}`, table, head })));
  const choose = $("encoder-head");
  choose.append(...heads.map(({ label }, value) => make("option", { value }, label)));
  choose.onchange = () => showMatrix($("encoder-matrix"), heads[choose.value].table, heads[choose.value].head, data.source);
  choose.onchange();
}

// the chosen head: its attention from each target token to each source token, or by distance
function showHead() {
  if (data.source) return showMatrix($("matrix"), attention()[state.layer], state.head, tokens.map((_, token) => textOf(token)));
  const { weight, longest } = data.reads.distances[state.layer] ?? {};
  if (!weight) return;
  const y = [...weight.subarray(state.head * longest, (state.head + 1) * longest)];
  const title = `layer ${state.layer}, head ${state.head + 1}`;
  const series = [{ name: "weight", x: range(y.length), y, colour: 0 }];
  const labels = { xLabel: "distance", yLabel: "mean weight", width: $("head").clientWidth };
  $("head").replaceChildren(lineChart({ title, series, ...labels, yLog: true }));
}

// the charts of memories and trainings, in their places
function showCharts(by) {
  for (const place of document.querySelectorAll("[data-chart]")) {
    const chart = data.charts[place.dataset.chart];
    const series = chart.series.map((line) => ({ ...line, x: line.x ?? line[by] }));
    place.replaceChildren(lineChart({ xLabel: by, ...chart, series, width: place.clientWidth }));
  }
}

function setUpTheme(draw) {
  const media = matchMedia("(prefers-color-scheme: dark)"), { style } = document.documentElement;
  const dark = () => (style.colorScheme ? style.colorScheme === "dark" : media.matches);
  const update = () => { $("theme").textContent = dark() ? "Light" : "Dark"; draw(); };
  $("theme").onclick = () => { style.colorScheme = dark() ? "light" : "dark"; update(); };
  (media.onchange = update)();
}

async function show() {
  await unpackAll(data);
  if ($("text")) showText();
  const draw = $("distances") ? showDistances() : () => {};
  if ($("encoder")) showEncoder();
  showCharts("updates");
  $("curves")?.addEventListener("change", (event) => showCharts(event.target.value));
  setUpTheme(draw);
  // for --picture: one figure alone, and its height
  const figure = $(new URLSearchParams(location.search).get("figure"));
  if (figure) [document.body.className, figure.className] = ["picture", "only"];
  document.documentElement.dataset.height = figure ? Math.ceil(figure.getBoundingClientRect().height) : 0;
}

show();
