"use strict";
// Draws each chart from the JSON beside it, as SVG as wide as there is room; again whenever the width changes.
// Whatever comes from a run enters the page as text, never as markup.

const HEIGHT = 190, TOP = 8, BOTTOM = 34;

function element(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  return made;
}

function html(name, className, text) {
  const made = document.createElement(name);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function colour(index) { return `var(--c${index % 10})`; }

// A text behind a square of a curve's colour.
function coloured(name, text, index) {
  const made = html(name, "", text), swatch = html("span", "swatch");
  swatch.style.background = colour(index);
  made.prepend(swatch);
  return made;
}

function keys(names) {
  const box = html("div", "keys");
  box.append(...names.map((name, i) => coloured("span", name, i)));
  return box;
}

function format(value, digits = 4) {
  if (value === null) return "not finite";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(digits - 2).replaceAll("-", "\u2212");
  const places = Math.max(0, digits - 5);
  const text = size >= 1e4 ? value.toLocaleString("en", { maximumFractionDigits: places }) : String(Number(value.toPrecision(digits)));
  return text.replace("-", "\u2212");
}

// The labels of an axis: as many digits as it takes to tell its marks apart.
function labelsOf(marks) {
  for (let digits = 4; digits < 16; digits++) {
    const labels = marks.map(mark => format(mark, digits));
    if (new Set(labels).size === labels.length) return labels;
  }
  return marks.map(String);
}

// A round distance of about `count` marks between low and high.
function distance(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 2.5, 5, 10].find(factor => factor * power >= rough * 0.999);
}

function ticks(low, high, count) {
  const step = distance(low, high, count), found = [];
  for (let i = Math.ceil(low / step - 1e-6); i * step <= high + step * 1e-6; i++) found.push(i === 0 ? 0 : i * step);
  return found;
}

function wholeTicks(low, high, count) {
  const found = ticks(low, Math.max(high, low + 1), count).filter(Number.isInteger);
  return found.filter(tick => tick >= low && tick <= high);
}

// The values of a stack, each on top of those below it: [name, steps, tops, bottoms].
function stacked(series) {
  const sums = series.length ? series[0][2].map(() => 0) : [];
  return series.map(([name, steps, values]) => {
    const bottoms = [...sums];
    values.forEach((value, i) => { sums[i] += value || 0; });
    return [name, steps, [...sums], bottoms];
  });
}

// The range of the vertical axis. A healthy bound is shown where the curve comes near it.
function range(chart, shown) {
  const values = shown.flatMap(one => one[2]).filter(value => value !== null);
  let low = Math.min(...values), high = Math.max(...values);
  if (!values.length) return [0, 1];
  if (chart.kind === "stack") low = 0;
  const size = high - low || Math.abs(high) || 1;
  if (chart.high !== null && chart.high > high && chart.high < high + 0.5 * size) high = chart.high;
  if (chart.low !== null && chart.low < low && chart.low > low - 0.5 * size) low = chart.low;
  if (low > 0 && low < 0.35 * high) low = 0;
  if (chart.unit === "share") { low = Math.max(0, low); high = Math.min(1, Math.max(high, low + 1e-9)); }
  if (low === high) [low, high] = [low - 0.5 * size, high + 0.5 * size];
  const step = distance(low, high, 4);
  return [Math.floor(low / step + 1e-6) * step, Math.ceil(high / step - 1e-6) * step];
}

function draw(box, chart, width = box.clientWidth) {
  const shown = chart.kind === "stack" ? stacked(chart.series) : chart.series;
  const [low, high] = range(chart, shown);
  const steps = shown.flatMap(one => one[1]), first = Math.min(...steps), last = Math.max(...steps);
  const marks = ticks(low, high, 4), labels = labelsOf(marks);
  const left = 12 + 7 * Math.max(...labels.map(label => label.length), 2), right = 14;
  const x = step => left + (last === first ? 0.5 : (step - first) / (last - first)) * (width - left - right);
  const y = value => TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM);
  const inside = value => Math.min(HEIGHT - BOTTOM, Math.max(TOP, y(value)));
  const svg = element("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, "aria-hidden": "true" });
  if (chart.low !== null || chart.high !== null) {
    const from = inside(chart.high === null ? high : chart.high), to = inside(chart.low === null ? low : chart.low);
    if (to > from) svg.append(element("rect", { class: "healthy", x: left, y: from, width: width - left - right, height: to - from }));
  }
  marks.forEach((mark, i) => {
    svg.append(element("line", { class: "grid", x1: left, x2: width - right, y1: y(mark), y2: y(mark) }));
    svg.append(element("text", { x: left - 6, y: y(mark) + 4, "text-anchor": "end" }, labels[i]));
  });
  svg.append(element("line", { class: "axis", x1: left, x2: width - right, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
  const along = last === first ? [first] : wholeTicks(first, last, Math.max(2, Math.floor(width / 90)));
  for (const tick of along) svg.append(element("text", { x: x(tick), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, format(tick)));
  svg.append(element("text", { x: width - right, y: HEIGHT - 4, "text-anchor": "end" }, chart.x));
  shown.forEach((one, i) => (chart.kind === "stack" ? drawArea : drawLine)(svg, one, colour(i), x, y, Math.min(14, (width - left - right) / steps.length * shown.length)));
  box.replaceChildren(svg);
  return { svg, x, y, left, right, width };
}

function drawLine(svg, [, steps, values], stroke, x, y) {
  let points = [];
  const flush = () => {
    if (points.length > 1) svg.append(element("polyline", { points: points.join(" "), fill: "none", stroke, "stroke-width": 1.8, "stroke-linejoin": "round" }));
    else if (points.length) svg.append(element("circle", { cx: points[0].split(",")[0], cy: points[0].split(",")[1], r: 3, fill: stroke }));
    points = [];
  };
  steps.forEach((step, i) => {
    if (values[i] === null) flush(); else points.push(`${x(step).toFixed(1)},${y(values[i]).toFixed(1)}`);
  });
  flush();
  if (steps.length <= 20) steps.forEach((step, i) => {
    if (values[i] !== null) svg.append(element("circle", { cx: x(step), cy: y(values[i]), r: 2.5, fill: stroke }));
  });
}

function drawArea(svg, [, steps, tops, bottoms], fill, x, y) {
  if (steps.length === 1) {
    svg.append(element("rect", { x: x(steps[0]) - 12, width: 24, y: y(tops[0]), height: y(bottoms[0]) - y(tops[0]), fill }));
    return;
  }
  const there = steps.map((step, i) => `${x(step).toFixed(1)},${y(tops[i]).toFixed(1)}`);
  const back = steps.map((step, i) => `${x(step).toFixed(1)},${y(bottoms[i]).toFixed(1)}`).reverse();
  svg.append(element("polygon", { points: [...there, ...back].join(" "), fill, "fill-opacity": 0.8 }));
}

// Values under the pointer, or under a cursor that the arrow keys move.
function follow(box, chart, state) {
  const steps = [...new Set(chart.series.flatMap(one => one[1]))].sort((a, b) => a - b);
  let at = steps.length - 1, line = null, tip = null;
  const hide = () => { line?.remove(); tip?.remove(); line = tip = null; };
  const show = () => {
    hide();
    const { svg, x, y, left, right, width } = state.drawn, step = steps[at];
    line = element("line", { class: "cursor", x1: x(step), x2: x(step), y1: TOP, y2: HEIGHT - BOTTOM });
    svg.append(line);
    tip = html("div", "tip");
    tip.append(html("div", "", `${chart.x} ${step}`));
    chart.series.forEach(([name, own, values], i) => {
      const place = own.indexOf(step);
      if (place < 0) return;
      const text = `${format(values[place])} ${chart.unit}`.trim() + (chart.series.length > 1 ? ` ${name}` : "");
      tip.append(coloured("div", text, i));
    });
    box.append(tip);
    const room = box.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room, x(step) > box.clientWidth / 2 ? x(step) - tip.offsetWidth - 10 : x(step) + 10))}px`;
  };
  box.addEventListener("pointermove", event => {
    const place = event.clientX - box.getBoundingClientRect().left;
    at = steps.reduce((best, step, i) => Math.abs(state.drawn.x(step) - place) < Math.abs(state.drawn.x(steps[best]) - place) ? i : best, 0);
    show();
  });
  box.addEventListener("pointerleave", hide);
  box.addEventListener("blur", hide);
  box.addEventListener("keydown", event => {
    const moved = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (event.key === "Escape") hide();
    if (moved === undefined) return;
    event.preventDefault();
    at = Math.max(0, Math.min(steps.length - 1, moved));
    show();
  });
}

function start(figure) {
  const box = figure.querySelector(".chart"), chart = JSON.parse(figure.querySelector("script").textContent);
  if (chart.series.length > 1) box.before(keys(chart.series.map(([name]) => name)));
  const state = { drawn: null };
  let width = 0;
  new ResizeObserver(() => {
    if (box.clientWidth === width || !box.clientWidth) return;
    width = box.clientWidth;
    state.drawn = draw(box, chart);
  }).observe(box);
  box.redraw = width => { state.drawn = draw(box, chart, width); };
  follow(box, chart, state);
}

const redraw = width => document.querySelectorAll("figure .chart").forEach(box => box.redraw(width));
addEventListener("beforeprint", () => redraw(300));  // two beside each other on a page of paper
addEventListener("afterprint", () => redraw());

function startAll() { document.querySelectorAll("figure").forEach(start); }
startAll();
