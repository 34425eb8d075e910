// The dashboards' panels, drawn from Prometheus' HTTP API. What to draw comes from /panels.json, the same panels as Grafana's.
"use strict";

const COLOURS = ["#2f6fde", "#e8833a", "#2f9e62", "#c2405b", "#8459c9", "#0f9aa8", "#b58a1b", "#6b7a90", "#d25fb0", "#7a9a2e"];
const GRAFANA = { green: "good", "dark-green": "good", yellow: "warn", orange: "warn", "dark-yellow": "warn", red: "bad", "dark-red": "bad" };
const POINTS = 240;
const ROW_PX = 30;
const MANY = 8; // with more series than this, those that are always 0 are left out
const WHOLE = [1, 2, 5].flatMap((digit) => [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7].map((power) => digit * power)).sort((a, b) => a - b);
const BINARY = Array.from({ length: 50 }, (_, power) => 2 ** power);
const element = (id) => document.getElementById(id);
const state = { dashboard: "", node: "", range: "900", refresh: "5", ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
let dashboards = [], scrape_s = 2, panels = [], timer = 0, round = 0, answering = 0, over = false;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) name === "class" ? (node.className = value) : (node[name] = value);
  node.append(...children);
  return node;
}

async function ask(path, parameters = {}) {
  const answer = await fetch(`api/v1/${path}?${new URLSearchParams(parameters)}`);
  const told = await answer.json();
  if (told.status !== "success") throw new Error(told.error || `status ${answer.status}`);
  return told.data;
}

const instant = async (expr) => (await ask("query", { query: expr })).result;

/** Now, the step between points and the variables, the same for all panels of one round. */
function frame() {
  const range = Number(state.range), step = Math.max(scrape_s, Math.ceil(range / POINTS));
  const end = Math.floor(Date.now() / 1000 / step) * step;
  const values = { __rate_interval: `${Math.max(15, 4 * scrape_s, step + scrape_s)}s`, __range: `${range}s`, job: "swarm" };
  values.node = state.node || ".*";
  return { start: end - Math.floor(range / step) * step, end, step, values };
}

class PanelView {
  constructor(panel) {
    this.panel = panel;
    this.body = make("div", { class: "body" });
    this.legend = make("div", { class: "legend" });
    this.window = make("small");
    const title = make("h3", { title: panel.description }, `${panel.title} `, this.window);
    this.node = make("article", { class: "panel" }, title, this.body, this.legend);
    this.node.style.gridColumn = `span ${panel.width}`;
    this.node.style.height = `${panel.height * ROW_PX}px`;
    this.plot = null;
    this.visible = false;
    this.drawn = -1;
  }

  async refresh(now) {
    if (!this.visible || this.drawn === round) return;
    this.drawn = round;
    this.window.textContent = windowOf(this.panel, now.values);
    const mine = round;
    try {
      const draw = await { timeseries: this.timeseries, stat: this.stat, table: this.table }[this.panel.kind].call(this, now);
      if (mine === round) draw();
    } catch (problem) {
      this.say(`this panel's query failed: ${problem.message}`);
    }
  }

  say(words) {
    this.plot?.destroy();
    this.plot = null;
    this.legend.replaceChildren();
    this.body.replaceChildren(make("div", { class: "empty", textContent: words }));
  }

  async timeseries({ start, end, step, values }) {
    const found = await Promise.all(
      this.panel.queries.map((query) => ask("query_range", { query: substituted(query.expr, values), start, end, step }))
    );
    const times = Array.from({ length: Math.round((end - start) / step) + 1 }, (_, index) => start + index * step);
    const series = found.flatMap((answer, number) =>
      answer.result.map(({ metric, values: samples }) => {
        const points = new Array(times.length).fill(null);
        for (const [time, text] of samples) {
          const value = Number(text);
          if (Number.isFinite(value)) points[Math.round((time - start) / step)] = value;
        }
        return { name: legendText(this.panel.queries[number].legend, metric), points };
      })
    );
    const told = series.filter(({ points }) => points.some((value) => value));
    if (series.length > MANY) series.splice(0, series.length, ...(told.length ? told : [{ ...series[0], name: `${series.length} series, all 0` }]));
    series.sort((one, other) => one.name.localeCompare(other.name, undefined, { numeric: true }));
    return () => (series.some(({ points }) => points.some((value) => value !== null)) ? this.draw(times, series) : this.say("no data"));
  }

  draw(times, series) {
    const names = JSON.stringify(series.map(({ name }) => name));
    this.raw = series.map(({ points }) => points);
    const lines = this.panel.stacked ? stacked(this.raw) : this.raw;
    if (!this.plot || this.names !== names) {
      this.plot?.destroy();
      this.names = names;
      this.legend.replaceChildren(
        ...series.map(({ name }, index) => {
          const key = make("i");
          key.style.background = COLOURS[index % COLOURS.length];
          return make("span", { title: name }, key, name, make("b"));
        })
      );
      this.body.replaceChildren();
      this.plot = new uPlot(this.options(series), [times, ...lines], this.body);
    } else this.plot.setData([times, ...lines]);
    this.values(null);
  }

  options(series) {
    const style = getComputedStyle(document.documentElement), faint = style.getPropertyValue("--faint"), grid = style.getPropertyValue("--grid");
    const { unit, decimals, minimum, maximum, stacked: isStacked } = this.panel;
    const axis = { stroke: faint, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "10.5px system-ui, sans-serif" };
    return {
      ...this.size(),
      legend: { show: false },
      cursor: { sync: { key: "all" }, y: false, points: { size: 5 }, drag: { x: false, y: false } },
      scales: { x: { time: true }, y: { range: (_, low, high) => yRange(low, high, minimum, maximum) } },
      axes: [
        { ...axis, size: 22, space: 46, values: (_, ticks) => ticks.map((tick, index) => clock(tick, ticks[index - 1])) },
        { ...axis, ...(decimals === 0 ? { incrs: WHOLE } : unit === "bytes" ? { incrs: BINARY } : {}), size: 56, space: 26, values: (_, ticks, __, ___, apart) => ticks.map((tick) => tickText(tick, unit, apart)) },
      ],
      series: [{}, ...series.map((_, index) => {
        const colour = COLOURS[index % COLOURS.length];
        return { stroke: colour, width: 1.5, points: { size: 4, fill: colour }, fill: isStacked ? colour + (index ? "00" : "55") : undefined };
      })],
      bands: isStacked ? series.slice(1).map((_, index) => ({ series: [index + 2, index + 1], fill: COLOURS[(index + 1) % COLOURS.length] + "55" })) : [],
      hooks: { setCursor: [(plot) => this.values(plot.cursor.idx)], ready: [(plot) => plot.over.addEventListener("click", () => toGroups(plot))] },
    };
  }

  size() {
    return { width: Math.max(60, this.body.clientWidth), height: Math.max(40, this.body.clientHeight) };
  }

  /** Show values beside the names in the legend: those under the pointer, else the newest. */
  values(index) {
    this.legend.querySelectorAll("b").forEach((cell, number) => {
      const points = this.raw[number];
      const value = index === null || index === undefined ? points.findLast((point) => point !== null) : points[index];
      cell.textContent = inUnit(value, this.panel.unit, this.panel.decimals);
    });
  }

  async stat({ values }) {
    const found = await Promise.all(this.panel.queries.map((query) => instant(substituted(query.expr, values))));
    const many = found.flat().length > 1;
    const cells = found.flatMap((result, number) =>
      result.map(({ metric, value: [, text] }) => {
        const value = Number(text), threshold = this.panel.thresholds.findLast((step) => value >= step.value);
        const shown = make("b", { class: GRAFANA[threshold?.color] || "", textContent: inUnit(value, this.panel.unit, this.panel.decimals) });
        return make("div", {}, shown, many ? make("small", { textContent: legendText(this.panel.queries[number].legend, metric) }) : "");
      })
    );
    return () => (cells.length ? this.body.replaceChildren(make("div", { class: "stats" }, ...cells)) : this.say("no data"));
  }

  async table({ values }) {
    const { labels, queries, unit } = this.panel;
    const found = await Promise.all(queries.map((query) => instant(substituted(query.expr, values))));
    const rows = new Map();
    found.forEach((result, number) =>
      result.forEach(({ metric, value: [, text] }) => {
        const key = JSON.stringify(labels.map((label) => metric[label] ?? ""));
        if (!rows.has(key)) rows.set(key, []);
        rows.get(key)[number] = Number(text);
      })
    );
    const head = [...labels.map((label) => make("th", { class: "name", textContent: label })), ...queries.map((query) => make("th", { textContent: query.legend }))];
    const lines = [...rows].sort(([one], [other]) => one.localeCompare(other)).map(([key, cells]) =>
      make("tr", {},
        ...JSON.parse(key).map((text) => make("td", { class: "name", textContent: text })),
        ...queries.map((query, number) => make("td", { textContent: inUnit(cells[number], query.unit || unit) })))
    );
    return () => {
      if (!lines.length) return this.say("no data");
      this.body.classList.add("scroll");
      Object.assign(this.body, { tabIndex: 0, role: "region", ariaLabel: this.panel.title }); // so that the keyboard can scroll it
      this.body.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines)));
    };
  }
}

/** The time that a panel's values are the mean of, if it follows the chosen range: other panels, and tables with fixed times, may show another value. */
function windowOf({ queries }, { __rate_interval: interval }) {
  return queries.some(({ expr }) => expr.includes("$__rate_interval")) ? `over ${duration(parseInt(interval, 10))}` : "";
}

/** Open the groups of the step that the node was at, at the clicked time. */
function toGroups(plot) {
  const at = plot.data[0][plot.cursor.idx];
  if (state.node && at) location.href = `/#/at/${encodeURIComponent(state.node)}/${at}`;
}

/** The lines stacked: each one is drawn on top of the ones before it. */
function stacked(lines) {
  const below = new Array(lines[0].length).fill(0);
  const empty = below.map((_, index) => lines.every((points) => points[index] === null));
  return lines.map((points) => points.map((value, index) => (empty[index] ? null : (below[index] += value ?? 0))));
}

function yRange(low, high, minimum, maximum) {
  if (low === null || high === null) [low, high] = [minimum ?? 0, maximum ?? 1];
  const room = 0.08 * (high - low) || 0.08 * Math.abs(high) || 1;
  const bottom = minimum ?? (low >= 0 && low - room < 0 ? 0 : low - room), top = maximum ?? high + room;
  return [bottom, top > bottom ? top : bottom + 1];
}

/** A tick's time of day, with the date if the day changes, and seconds if they are not zero. */
function clock(tick, before) {
  const day = new Date(tick * 1000), two = (number) => String(number).padStart(2, "0");
  const text = `${two(day.getHours())}:${two(day.getMinutes())}` + (day.getSeconds() ? `:${two(day.getSeconds())}` : "");
  return before && new Date(before * 1000).getDate() !== day.getDate() ? `${day.getDate()}.${day.getMonth() + 1}. ${text}` : text;
}

/** One card for each alert name and state. `Watchdog` is left out: it always fires, which shows that alerting works. */
async function showAlerts() {
  const [{ alerts }, { groups }] = await Promise.all([ask("alerts"), ask("rules", { type: "alert" })]);
  const cards = new Map();
  for (const alert of alerts.filter(({ labels }) => labels.severity !== "none")) {
    const key = [alert.state === "firing" ? 0 : 1, alert.labels.severity === "critical" ? 0 : 1, alert.labels.alertname].join(" ");
    cards.set(key, [...(cards.get(key) || []), alert]);
  }
  const shown = [...cards].sort(([one], [other]) => one.localeCompare(other)).map(([, same]) => alertCard(same));
  const [checked, kind, never] = whatWasChecked(groups);
  const first = !answering ? `${over ? "The run has ended, so no process is scraped" : `No process is scraped yet${shown.length ? "" : ", so no alert can fire"}`}: ` : shown.length || never ? "" : "No alert fires: ";
  element("alerts").replaceChildren(...shown, make("span", { class: kind === "good" && shown.length ? "" : kind, textContent: first + checked }));
}

/** How many alert rules were evaluated and when, and whether that is good: bad if the evaluation is old or fails, a warning if nothing is scraped or Prometheus has only just started. */
function whatWasChecked(groups) {
  const evaluated = groups.filter(({ rules }) => rules.length);
  const rules = evaluated.reduce((sum, group) => sum + group.rules.filter((rule) => rule.labels?.severity !== "none").length, 0);
  const oldest = Math.min(...evaluated.map(({ lastEvaluation }) => Date.parse(lastEvaluation))), age = Math.max(0, (Date.now() - oldest) / 1000);
  const failing = evaluated.flatMap((group) => group.rules).filter((rule) => rule.health === "err").map(({ name }) => name);
  const never = oldest < 0; // Prometheus gives the year 1
  const words = `${rules} alert rules, ${never ? "not checked yet" : `checked ${duration(age)} ago`}` + (answering && !never ? ` over ${answering} process${answering === 1 ? "" : "es"}` : "") + (failing.length ? `; not checked: ${failing.join(", ")}` : "");
  return [words, rules === 0 || (age >= 60 && !never) || failing.length ? "bad" : answering && !never ? "good" : "warn", never];
}

function alertCard(same) {
  const [{ labels, annotations, state: how }] = same;
  const since = Math.min(...same.map(({ activeAt }) => Date.parse(activeAt)));
  const what = same.length > 1 ? `${same.length} times` : annotations.summary || "";
  const title = same.map((alert) => `${alert.annotations.summary || ""}\n${alert.annotations.description || ""}`).join("\n\n");
  const name = make("b", { textContent: labels.alertname });
  const card = make("span", { class: `alert ${labels.severity || ""} ${how}`, title }, name, `${what}, ${how} for ${duration((Date.now() - since) / 1000)}`);
  const runbook = annotations.runbook_url || "";
  const [href, target] = /^https?:/.test(runbook) ? [runbook, "_blank"] : [`/#/runbook/${encodeURIComponent(labels.alertname)}`, ""];
  if (runbook) card.append(" ", make("a", { href, textContent: "runbook", target, rel: "noreferrer" }));
  return card;
}

async function showTargets() {
  const [result, expected] = await Promise.all([instant('up{job="swarm"}'), fetch("expected.json").then((answer) => answer.json())]);
  const nodes = [...new Set(result.map(({ metric }) => metric.node))].sort();
  const down = result.filter(({ value }) => value[1] !== "1").map(({ metric }) => `${metric.node} ${metric.role}`);
  const scraped = new Set(result.map(({ metric }) => `${metric.node} ${metric.role}`));
  down.push(...expected.map(({ node, role }) => `${node} ${role}`).filter((name) => !scraped.has(name)));
  answering = result.filter(({ value }) => value[1] === "1").length;
  const all = answering + down.length;
  over = !answering && (await hasEnded());
  const text = over ? "the run has ended, so no process is scraped" : all ? `${answering} of ${all} processes answer` + (down.length ? `; not ${down.join(", ")}` : "") : "no process is scraped yet";
  element("targets").replaceChildren(make("span", { class: down.length ? "bad" : result.length ? "" : "warn", textContent: text }));
  chooseNodes(nodes);
}

/** Whether the run that is looked at has ended. The panels are also served without a swarm's page. */
async function hasEnded() {
  const answer = await fetch("swarm.json");
  return answer.ok && (await answer.json()).state === "ended";
}

function chooseNodes(nodes) {
  const many = chosen().variables.some(({ name, many: all }) => name === "node" && all);
  const options = [...(many ? [["", "all"]] : []), ...nodes.map((node) => [node, node])];
  const select = element("node");
  if (JSON.stringify(options) !== select.dataset.options) {
    select.dataset.options = JSON.stringify(options);
    select.replaceChildren(...options.map(([value, textContent]) => make("option", { value, textContent })));
  }
  const before = state.node;
  if (!options.some(([value]) => value === state.node) && nodes.length) state.node = options[0][0];
  select.value = state.node;
  if (before !== state.node) remember();
}

const chosen = () => dashboards.find(({ uid }) => uid === state.dashboard) || dashboards[0];
const remember = () => history.replaceState(null, "", `#${new URLSearchParams(state)}`);

function build() {
  const dashboard = chosen();
  state.dashboard = dashboard.uid;
  document.title = `${dashboard.title} · swarm`;
  element("tabs").replaceChildren(...dashboards.map(({ uid, title, description }) => {
    const tab = make("button", { textContent: title, title: description, onclick: () => change("dashboard", uid) });
    if (uid === dashboard.uid) tab.setAttribute("aria-current", "page");
    return tab;
  }));
  for (const panel of panels) panel.plot?.destroy();
  panels = [];
  seen.disconnect();
  sized.disconnect();
  element("rows").replaceChildren(...dashboard.rows.map((row) => {
    const views = row.panels.map((panel) => new PanelView(panel));
    panels.push(...views);
    for (const view of views) {
      view.node.view = view.body.view = view;
      seen.observe(view.node);
      sized.observe(view.body);
    }
    return make("details", { open: !row.collapsed }, make("summary", {}, make("h2", { textContent: row.title })), make("div", { class: "grid" }, ...views.map(({ node }) => node)));
  }));
}

function change(name, value) {
  state[name] = value;
  if (name === "dashboard") build();
  for (const select of ["node", "range", "refresh"]) element(select).value = state[select];
  remember();
  refresh();
}

/** One round: targets and alerts first, because the list of nodes depends on them, then every visible panel. */
async function refresh() {
  clearTimeout(timer);
  const mine = ++round;
  try {
    await showTargets();
    await showAlerts();
    const now = frame();
    await Promise.all(panels.map((panel) => panel.refresh(now)));
  } catch (problem) {
    element("targets").replaceChildren(make("span", { class: "bad", textContent: `no answer (${problem.message}): check that the dashboard is still running` }));
  }
  if (mine === round && Number(state.refresh)) timer = setTimeout(() => (document.hidden ? (timer = setTimeout(refresh, 1000)) : refresh()), 1000 * Number(state.refresh));
}

const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    target.view.visible = isIntersecting;
    if (isIntersecting && round) target.view.refresh(frame());
  }
}, { rootMargin: "200px" });
const sized = new ResizeObserver((entries) => entries.forEach(({ target: { view } }) => view.plot?.setSize(view.size())));

async function begin() {
  let prometheus;
  ({ dashboards, scrape_s, prometheus } = await (await fetch("panels.json")).json());
  for (const name of ["node", "range", "refresh"]) {
    element(name).value = state[name];
    element(name).onchange = (event) => change(name, event.target.value);
  }
  if (prometheus === false) {
    const words = "The panels need Prometheus, which is not installed here: install it (Debian: apt-get install prometheus) and start the dashboard again. ";
    element("rows").replaceChildren(make("p", { class: "without" }, words, make("a", { href: "/", textContent: "The swarm's page" }), " works without it."));
    return;
  }
  build();
  await refresh();
}
document.addEventListener("visibilitychange", () => document.hidden || refresh());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (build(), refresh()));
begin();
