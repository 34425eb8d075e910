// Elements, numbers and lines for all views of the page. Foreign text is only ever set as `textContent`.
"use strict";

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** An element. Attributes are set as attributes, `text` as its text; children are elements or plain strings. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A name that a node chose, isolated so that right-to-left characters in it do not reorder the text around it. */
const name = (text, attributes = {}) => el("bdi", { ...attributes, text });
const ratio = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const signed = (value) => (value === null || value === undefined ? "–" : (value > 0 ? "+" : value < 0 ? "−" : "±") + Math.abs(value).toFixed(3));
const count = (value) => value.toLocaleString("en");
const many = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;

function ago(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 90) return `${whole} s`;
  if (whole < 5400) return `${Math.round(whole / 60)} min`;
  return whole < 172800 ? `${Math.round(whole / 3600)} h` : `${Math.round(whole / 86400)} days`;
}

/** A time of day as every display writes it, of 24 hours, with the date if it is not today's: for what stays on a page while time goes on. */
function timeOf(seconds) {
  const at = new Date(seconds * 1000), two = (value) => String(value).padStart(2, "0");
  const clock = [at.getHours(), at.getMinutes(), at.getSeconds()].map(two).join(":");
  return at.toDateString() === new Date().toDateString() ? clock : `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock}`;
}

const route = (...parts) => "#/" + parts.map(encodeURIComponent).join("/");

/** A row of a table whose cells a narrow screen stacks: each knows the name of its column. */
const stacked = (head, ...cells) => el("tr", {}, ...cells.map((cell, index) => (cell.setAttribute("data-head", head[index]), cell)));

/** A wide table that scrolls separately, also by keyboard. */
const scrolled = (label, table) => el("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, table);

/** A section with a heading; without a title the children have the heading. */
function section(id, title, ...children) {
  return el("section", { "aria-labelledby": `${id}-title`, id }, title === null ? null : el("h2", { id: `${id}-title`, text: title }), ...children);
}

/** A curve without axes, for a table's cell; its label is for people who cannot see it. */
function spark(points) {
  const width = 90, height = 22;
  const words = points.length > 1 ? `from ${ratio(points[0][1])} to ${ratio(points.at(-1)[1])} over ${points.length} evaluations` : "one evaluation";
  const picture = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": words });
  if (points.length > 1) {
    const [low, high] = bounds(points.map(([, y]) => y)), last = points.length - 1;
    const place = ([, y], index) => `${(2 + (index * (width - 4)) / last).toFixed(1)},${(height - 3 - ((y - low) * (height - 6)) / (high - low)).toFixed(1)}`;
    picture.append(svg("polyline", { points: points.map(place).join(" ") }));
  }
  return picture;
}

function bounds(values) {
  const low = Math.min(...values), high = Math.max(...values);
  return high > low ? [low, high] : [low - 0.5, low + 0.5];
}

const DASHES = ["", "6 3", "2 3", "8 3 2 3", "1 2", "10 4", "4 2 1 2", "3 6"];

/** Lines over a common x axis, with y from 0 to 1, or as far as the values go. `lines`: {title, points: [[x, y]], link?: x => address or null}. They differ in dash and number. */
function chart(label, lines, axis) {
  const width = Math.min(1200, document.documentElement.clientWidth) - 32, height = 220, left = 52, bottom = 24, right = 26, top = 8;
  const [low, high] = bounds(lines.flatMap(({ points }) => points.map(([x]) => x)));
  const x = (value) => left + ((value - low) * (width - left - right)) / (high - low);
  const values = lines.flatMap(({ points }) => points.map(([, b]) => b)), least = Math.min(0, ...values), most = Math.max(1, ...values);
  const y = (value) => height - bottom - ((value - least) * (height - bottom - top)) / (most - least);
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: lines.some(({ link }) => link) ? "group" : "img", "aria-label": label });
  for (const level of [0, 0.25, 0.5, 0.75, 1].map((part) => least + part * (most - least))) {
    picture.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(level), y2: y(level) }), label_at(most - least < 1000 ? level.toFixed(2) : level.toExponential(1), left - 5, y(level) + 4, "end"));
  }
  picture.append(label_at(count(Math.round(low)), left, height - 6, "start"), label_at(`${axis} ${count(Math.round(high))}`, width - right, height - 6, "end"));
  lines.forEach(({ points, link }, index) => {
    const kind = `line line-${index % 8}`;
    picture.append(svg("polyline", { class: kind, "stroke-dasharray": DASHES[index % 8], points: points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") }));
    for (const [a, b] of link ? points.filter(([x], last) => link(x) || last === points.length - 1) : points.slice(-1)) {
      const dot = svg("circle", { class: kind, cx: x(a).toFixed(1), cy: y(b).toFixed(1), r: link?.(a) ? 4 : 3 });
      picture.append(link?.(a) ? svg("a", { href: link(a), "aria-label": `${axis} ${a}: ${ratio(b)}` }, dot) : dot);
    }
  });
  for (const label of apart(lines.map(({ points }, index) => [String(index + 1), x(points.at(-1)[0]) + 8, y(points.at(-1)[1]) + 4, "start"]), height - 4)) picture.append(label_at(...label));
  const legend = el("ol", { class: "legend" }, ...lines.map(({ title, points }) => el("li", {}, name(title), ` ${ratio(points.at(-1)[1])}`)));
  return el("figure", { class: "sheet" }, picture, legend);
}

/** Labels, [text, x, y, …] each, moved up or down from where their lines end until none covers another; `lowest` is the largest y. */
function apart(labels, lowest) {
  const gap = 15; // more than the height of a digit, by swarm.css
  const sorted = [...labels].sort(([, , one], [, , other]) => one - other);
  sorted.forEach((label, index) => { if (index) label[2] = Math.max(label[2], sorted[index - 1][2] + gap); });
  let ceiling = lowest;
  for (const label of sorted.toReversed()) { label[2] = Math.min(label[2], ceiling); ceiling = label[2] - gap; }
  return sorted;
}

function label_at(text, x, y, anchor, kind = "") {
  const node = svg("text", { x, y, "text-anchor": anchor, class: kind });
  node.textContent = text;
  return node;
}

/** The dashboard did not answer, or not to the end. */
class NoAnswer extends Error {}
/** What was asked for is not there, in the dashboard's words. */
class NotFound extends Error {}

async function get(path, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  let answer, told;
  try {
    answer = await fetch(path + (query ? `?${query}` : ""));
    told = await answer.json();
  } catch (problem) {
    throw problem instanceof TypeError ? new NoAnswer() : problem; // as fetch reports a failed connection
  }
  if (!answer.ok) throw new NotFound(told.problem || told.error || `status ${answer.status}`);
  return told;
}
