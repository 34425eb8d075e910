// The first two answers of the page: is the model getting better, and what does it say.
"use strict";

const OTHERS_MOST = 8, QUESTIONS_FIRST = 4, QUESTIONS_MORE = 8, SMOOTHED = 9, STEPS_FOR_A_CURVE = 4, REWARDS_SHOWN = 8;

/** The 95 % interval of a share of n independent answers (Wilson, 1927): of the passes, where they are known, since the share is rounded. */
function interval([, shown, n, passes]) {
  const share = passes == null ? shown : passes / n, z = 1.96, middle = share + (z * z) / (2 * n), half = z * Math.sqrt((share * (1 - share)) / n + (z * z) / (4 * n * n));
  return [(middle - half) / (1 + (z * z) / n), (middle + half) / (1 + (z * z) / n)].map((each) => Math.min(1, Math.max(0, each)));
}
const range = (point) => interval(point).map((each) => ratio(each)).join(" to ");
const newestOf = ({ curve }) => curve.at(-1);
const baseOf = ({ base, curve }) => (base === null ? null : curve.find(([version]) => version === 0) || null);
const isBetter = ({ outcome }) => outcome === "learned" || outcome === "fell";

/** What the page is about: the chosen node with its row, and the nodes whose scores can be compared with its own. */
function focus(told, name) {
  const rows = told.leaderboard || [], nodes = told.nodes || [], here = nodes.filter(({ kind }) => kind !== "elsewhere").map(({ node }) => node);
  const names = [...new Set([...rows.filter(({ trusted }) => trusted).map(({ node }) => node), ...here])];
  const first = rows.find(({ node, trusted }) => trusted && here.includes(node)) || rows.find(({ trusted }) => trusted);
  const mine = names.includes(name) ? name : first?.node || names[0] || "";
  const row = rows.find(({ node, trusted }) => trusted && node === mine) || null;
  const alike = row ? rows.filter((each) => each.trusted && each.set === row.set && each.scorer === row.scorer && each.n === row.n && each.by_reward === row.by_reward) : [];
  const node = nodes.find((each) => each.node === mine) || null;
  return { name: mine, names, row, alike, node, steps: node?.steps || 0, over: isDone(told) };
}

/** The answer to the first question: a headline and one sentence. */
function answer(told, { name: mine, row, alike, node, over }) {
  const gone = told.state === "failed" && told.nodes.find(({ kind }) => kind === "silent"), base = row && baseOf(row);
  const titled = (title) => (gone ? (gone.step ? `${gone.node} has stopped at step ${count(gone.step)}` : `${gone.node} has stopped before its first step`) : title);
  if (told.state === "starting" && (!row || row.version === 0)) return ["Starting: the first step comes next", base && !row.by_reward ? `Untrained, it gets ${rightOf(base)} held-out questions right. They are never trained on.` : STATES.starting[2]];
  if (!row) return [titled(over ? "No held-out score is on record" : "No held-out score yet"), told.state === "ended" ? "" : "Each node first evaluates its base policy, and then a version every now and then."];
  if (row.by_reward) return [titled(`Held-out reward ${ratio(row.newest)}${base ? `, ${ratio(row.base)} before training` : ""}`), row.outcome === "unknown" ? `It is a mean reward; ${NO_PASS}.` : `${row.words[0].toUpperCase()}${row.words.slice(1)}.`];
  if (row.outcome === "unknown" && row.version === 0 && over) return [titled("Nothing was evaluated after step 0"), `The base policy gets ${rightOf(newestOf(row))} held-out questions right. To evaluate the newest checkpoint: ${told.ended?.next.map(([, command]) => command).find((each) => each.startsWith("swarm eval")) || `swarm eval var/runs/RUN/${mine}`}`];
  if (row.outcome === "unknown") return [titled(row.version === 0 ? `The base policy gets ${ratio(row.newest, 2)}; the next score will tell` : over ? "Not judged" : "Not judged yet"), row.version === 0 ? `It gets ${rightOf(newestOf(row))} held-out questions right. They are never trained on.` : `${row.words[0].toUpperCase()}${row.words.slice(1)}.`];
  const better = alike.filter(isBetter), one = alike.length === 1, all = better.length === alike.length;
  const who = one ? "Your model" : !all ? `${better.length} of ${alike.length} models` : alike.length === 2 ? "Both models" : `All ${alike.length} models`, many_ = !one && better.length !== 1;
  const title = row.outcome === "fell" ? `${one ? "Your model" : mine} got better, and fell from its best` : better.length ? (over ? `${who} got better` : `${who} ${many_ ? "are" : "is"} getting better`) : row.outcome === "failed" ? (row.gain < 0 && -row.gain > row.chance ? "Worse than before training" : "Fell back from its best") : over ? "No clear gain" : "No clear gain yet";
  const point = newestOf(row), more = Math.round((row.newest - row.base) * point[2]);
  return [titled(title), `${one ? "It" : mine} ${over ? (point[0] < (node?.step || 0) ? `got at step ${count(point[0])}` : "ends with") : "now gets"} ${rightOf(point)} held-out questions right, ${count(Math.abs(more))} ${more < 0 ? "fewer" : "more"} than before training${row.changed ? ` (${count(row.changed[0])} newly right, ${count(row.changed[1])} lost)` : ""}; chance explains at most ${count(Math.floor(row.chance * point[2]))}.`];
}
const rightOf = ([, share, n, passes]) => `${count(passes ?? Math.round(share * n))} of ${count(n)}`;

/** Step n of N, pace, time left. */
function progress(told, { name: mine, node, names, steps, over }) {
  const step = node ? (node.kind === "elsewhere" ? node.version : node.step) : 0, pace = over || isUnsure(told) || !step ? null : node?.pace;
  const paced = pace ? `${60 * pace >= 99.95 ? count(Math.round(60 * pace)) : (60 * pace).toFixed(1)} steps an hour` : "";
  const left = pace && steps > step ? `about ${ago((60 * (steps - step)) / pace)} left` : "";
  const facts = [paced, left].filter(Boolean).join(", ") || (over && steps && step >= steps ? "all steps taken" : told.state === "starting" && node ? node.words.replace("starting: ", "") : "");
  const parts = steps ? [svg("svg", { class: "bar", viewBox: "0 0 100 6", preserveAspectRatio: "none", role: "progressbar", "aria-label": "Steps taken", "aria-valuemin": 0, "aria-valuemax": steps, "aria-valuenow": Math.min(step, steps) }, svg("rect", { class: "all", width: 100, height: 6 }), svg("rect", { class: "done", width: (100 * Math.min(step, steps)) / steps, height: 6 }))] : [];
  return el("div", {}, el("p", {}, el("b", { text: `Step ${count(step)}${steps ? ` of ${count(steps)}` : ""}` }), names.length > 1 ? el("span", { class: "small soft" }, " ", name(mine)) : null), ...parts, facts ? el("p", { class: "small soft", text: facts }) : null);
}

const ticks = (most, about) => {
  const raw = most / about, power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= raw * 0.999);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, index) => Number((index * step).toPrecision(6)));
};
/** The smallest end of an axis from 0 that holds a share, so that noise does not look like learning. */
const ceiling = (highest) => [0.1, 0.25, 0.5, 1].find((each) => each >= highest) ?? ticks(highest * 1.2, 4).find((each) => each >= highest) ?? highest;
const column = () => { const page = Math.min(1232, document.documentElement.clientWidth) - 32; return page > 868 ? [page - 418, 332] : [page - 26, page]; };

/** The held-out curve of the chosen node with its intervals, those of the others in grey, and the base policy's line. */
function heldOutChart({ row, alike, steps }) {
  const width = column()[0], height = 220, narrow = width < 460, left = 42, high = 10, low = 24, base = baseOf(row), shown = row.by_reward ? null : interval;
  const others = alike.filter((each) => each !== row).slice(0, OTHERS_MOST), several = others.length > 0;
  const lasts = [row, ...others].map((each) => newestOf(each)[0]), last = Math.max(...lasts), end = Math.max(steps, last, 1);
  const values = [row, ...others].flatMap(({ curve }) => curve.map(([, value]) => value)), least = Math.min(0, ...values), most = ceiling(Math.max(...values, ...(shown ? row.curve.map((each) => interval(each)[1]) : [])));
  const label = (each, value) => (several && !narrow ? `${each.node.slice(0, 14)} ` : "") + ratio(value), room = several && !narrow ? 160 : 56, right = (1 - last / end) * (width - left - 16) > room ? 16 : room;
  const x = (version) => left + (version / end) * (width - left - right), y = (value) => high + ((most - value) / (most - least)) * (height - high - low);
  const spoken = `Held-out ${row.by_reward ? "mean reward" : "pass rate"} of ${row.node} by step: ${row.curve.slice(-12).map(([version, value]) => `${ratio(value)} at step ${version}`).join(", ")}.${base ? ` Before training ${ratio(row.base)}.` : ""}`;
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spoken });
  const levels = least < 0 ? [least, 0, most] : most === 1 ? [0, 0.25, 0.5, 0.75, 1] : ticks(most, 5);
  for (const level of levels) picture.append(svg("line", { class: level ? "grid" : "axis", x1: left, x2: width - right, y1: y(level), y2: y(level) }), label_at(level ? level.toFixed(2) : "0", left - 7, y(level) + 4.5, "end"));
  for (const step of new Set(narrow ? [0, Math.round(end / 2), end] : ticks(end, 6).filter(Number.isInteger))) picture.append(label_at(step === 0 ? "step 0" : count(step), x(step), height - 5, step === 0 ? "start" : step === end ? "end" : "middle"));
  if (shown && row.curve.length > 1) picture.append(svg("polygon", { class: "band", points: [...row.curve.map((each) => [each[0], interval(each)[1]]), ...row.curve.toReversed().map((each) => [each[0], interval(each)[0]])].map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") }));
  if (base) picture.append(svg("line", { class: "base", x1: left, x2: width - right, y1: y(row.base), y2: y(row.base) }));
  const ends = [];
  [...others.toReversed(), row].forEach((each) => {
    const own = each === row, points = each.curve.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
    picture.append(svg("polyline", { class: own ? "line" : "other", points, "stroke-dasharray": own ? "" : DASHES[(others.indexOf(each) + 1) % DASHES.length] }));
    for (const point of each.curve) {
      if (own && shown) picture.append(svg("line", { class: "whisker", x1: x(point[0]), x2: x(point[0]), y1: y(interval(point)[0]), y2: y(interval(point)[1]) }));
      if (own || point === newestOf(each)) picture.append(svg("circle", { class: own ? "line" : "odot", cx: x(point[0]).toFixed(1), cy: y(point[1]).toFixed(1), r: own ? 4 : 3.5 }));
    }
    if (own || !narrow) ends.push([label(each, newestOf(each)[1]), x(last) + 12, y(newestOf(each)[1]) + 4.5, "start", own ? "on" : ""]);
  });
  if (row.best && row.best[0] && row.best[0] !== newestOf(row)[0]) picture.append(svg("circle", { class: "ring", cx: x(row.best[0]), cy: y(row.best[1]), r: 9 }));
  if (row.curve.length === 1) ends.pop();
  const based = base ? [`before training ${ratio(row.base)}`, width - right, y(row.base) - 7, "end", ""] : null, besides = based && x(last) + 12 + room > width - right - 170;
  for (const each of apart([...ends, ...(besides && x(last) < width - right - 1 ? [based] : [])], height - low - 4)) picture.append(label_at(...each));
  if (based && !(besides && x(last) < width - right - 1)) picture.append(label_at(...based));
  return picture;
}

function evaluationTable({ row, alike }) {
  const shown = [row, ...alike.filter((each) => each !== row)].slice(0, 6), versions = [...new Set(shown.flatMap(({ curve }) => curve.map(([version]) => version)))].sort((one, other) => one - other);
  const cell = ({ curve, by_reward: byReward }, version) => { const point = curve.find(([each]) => each === version); return el("td", { class: "n", text: point ? `${ratio(point[1])}${byReward ? "" : ` (${range(point)})`}` : "–" }); };
  return el("details", { class: "small", id: "evaluations" }, el("summary", { class: "soft", text: "As a table" }), scrolled("Held-out scores by step", el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "step" }), ...shown.map(({ node }) => el("th", { scope: "col", class: "n" }, name(node))))), el("tbody", {}, ...versions.map((version) => el("tr", {}, el("th", { scope: "row", text: count(version) }), ...shown.map((each) => cell(each, version))))))));
}

/** Now, best, before and gain, each with its interval. */
function figures({ row, names, node, over }) {
  const now = newestOf(row), atEnd = over && now[0] >= (node?.step || 0), base = baseOf(row), only = row.curve.length < 2, of = (point) => (row.by_reward ? "" : range(point));
  const line = (title, step, value, note, kind = "") => el("tr", { class: kind }, el("th", { scope: "row" }, title, step === null ? null : el("span", { class: "note", text: ` step ${count(step)}` })), el("td", { class: "n value", text: value }), el("td", { class: "n note", text: note }));
  const lines = only ? [line(base ? "Before" : "Now", base ? null : now[0], ratio(now[1]), of(now), "now")] : [
    line(atEnd ? "At the end" : over ? "Last score" : "Now", atEnd ? null : now[0], ratio(now[1]), of(now), "now"),
    row.best ? line("Best", row.best[0], ratio(row.best[1]), row.best[0] === now[0] ? "the newest" : of(row.best)) : null,
    base ? line("Before", null, ratio(base[1]), of(base)) : null,
    row.gain === null ? null : line("Gain", null, signed(row.gain), row.chance === null ? "" : `chance ≤ ${ratio(row.chance)}`, "gain"),
    !row.by_reward && row.mean !== null && Math.abs(row.mean - row.newest) > 0.0005 ? line("Held-out reward", null, ratio(row.mean), "mean") : null,
  ];
  const head = el("tr", {}, el("th", { scope: "col" }, names.length > 1 ? name(row.node) : el("span", { class: "hidden", text: "when" })), el("th", { scope: "col", class: "n", text: row.by_reward ? "mean reward" : "share right" }), el("th", { scope: "col", class: "n", text: row.by_reward ? "" : "95 % interval" }));
  return el("div", {}, el("table", { class: "figures" }, el("caption", { class: "hidden", text: `Held-out scores of ${row.node}` }), el("thead", {}, head), el("tbody", {}, ...lines.filter(Boolean))), row.unknown ? el("p", { class: "small warn", text: `${ofAnswers(row)}.` }) : null);
}

/** The rewards of a node's own answers as dots, and their mean over the steps around each. */
function trainingReward(mine, { steps }) {
  const points = mine.steps.filter(([, , value]) => value !== null).map(([step, , value, , , changes]) => [step, value, changes]), title = el("h3", { text: "Training reward" });
  if (points.length < 2) return el("div", { class: "trained" }, title, el("p", { class: "small soft", text: points.length ? `${ratio(points[0][1])} at step ${count(points[0][0])}.` : "It comes with the first steps." }));
  // Rewards before and after a change of the reward are never in one mean.
  const alike = (point) => points.filter(([, , changes]) => changes === point[2]), begun = alike(points.at(-1)), changed = begun.length < points.length;
  const about = (point) => { const same = alike(point), index = same.indexOf(point); return mean(same.slice(Math.max(0, index - 4), index + 5).map(([, value]) => value)); }, newest = begun.slice(-SMOOTHED), values = points.map(([, value]) => value);
  const width = column()[1], height = 86, left = 40, least = Math.min(0, ...values), most = ceiling(Math.max(...values)), end = Math.max(steps, points.at(-1)[0]), begin = steps ? 0 : points[0][0] - 1;
  const x = (step) => left + ((step - begin) / (end - begin)) * (width - left - 4), y = (value) => 8 + ((most - value) / (most - least)) * (height - 16);
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Mean reward of its own answers by step: ${ratio(mean(newest.map(([, value]) => value)), 2)} over the newest ${newest.length} steps` });
  for (const level of [least, most]) picture.append(svg("line", { class: level === 0 ? "axis" : "grid", x1: left, x2: width - 4, y1: y(level), y2: y(level) }), label_at(String(Number(level.toPrecision(3))), left - 7, y(level) + 4.5, "end"));
  for (const [step, value] of points) picture.append(svg("circle", { class: "faint", cx: x(step).toFixed(1), cy: y(value).toFixed(1), r: 1.8 }));
  for (const each of new Set(points.map(([, , changes]) => changes))) picture.append(svg("polyline", { class: "line", points: points.filter(([, , changes]) => changes === each).map((point) => `${x(point[0]).toFixed(1)},${y(about(point)).toFixed(1)}`).join(" ") }));
  const note = changed ? el("p", { class: "small soft", text: `The reward was changed before step ${count(begun[0][0])}; earlier ones cannot be compared.` }) : null;
  return el("div", { class: "trained" }, el("div", { class: "head" }, title, el("span", { class: "end" }, el("b", { text: ratio(mean(newest.map(([, value]) => value)), 2) }), el("span", { class: "small soft", text: newest.length < begun.length ? ` mean of the newest ${newest.length} of ${many(begun.length, "step")}; the line averages as many` : ` mean of ${many(newest.length, "step")}` }))), picture, note);
}

/** Lengths of a node's own answers, and each of its rewards where there are several: a curve from 0, the mean of the first steps, and of the newest. */
function byStep({ lengths, parts }, node) {
  const enough = (points) => points.length >= STEPS_FOR_A_CURVE, rewards = Object.entries(parts).filter(([, points]) => enough(points)), several = rewards.length > 1;
  const kinds = [["answer length", lengths.map(([step, tokens]) => [step, tokens]), (value) => value.toFixed(value < 100 ? 1 : 0)], ["cut off", lengths.map(([step, , share]) => [step, share]), (value) => `${(100 * value).toFixed(0)} %`]].filter(([, points]) => enough(points));
  const lines = [...kinds, ...(several ? rewards.slice(0, REWARDS_SHOWN).map(([reward, points]) => [reward, points, (value) => ratio(value, 2)]) : [])];
  if (!lines.length) return null;
  const sizeOf = (points) => Math.min(SMOOTHED, Math.ceil(points.length / 2)), sizes = [...new Set(lines.map(([, points]) => sizeOf(points)))].join(" or ");
  const line = ([title, points, told]) => {
    const about = points.map((_, index) => mean(points.slice(Math.max(0, index - 4), index + 5).map(([, value]) => value))), size = sizeOf(points), of = (some) => told(mean(some.map(([, value]) => value)));
    const low = Math.min(0, ...about), high = Math.max(title === "answer length" ? 1 : ceiling(Math.max(...about, 0)), ...about), begin = points[0][0], x = (step) => 2 + (92 * (step - begin)) / (points.at(-1)[0] - begin), y = (value) => 3 + (22 * (high - value)) / (high - low);
    const first = of(points.slice(0, size)), now = of(points.slice(-size)), picture = svg("svg", { viewBox: "0 0 96 28", role: "img", "aria-label": `${title} by step: from ${first} to ${now}` }, svg("line", { class: "axis", x1: 2, x2: 94, y1: y(0), y2: y(0) }), svg("polyline", { class: "thin", points: points.map(([step], index) => `${x(step).toFixed(1)},${y(about[index]).toFixed(1)}`).join(" ") }));
    return el("tr", {}, el("th", { scope: "row" }, name(title)), el("td", { class: "n", text: first }), el("td", { class: "pic" }, picture), el("td", { class: "n" }, el("b", { text: now })));
  };
  const head = el("tr", {}, el("th", { scope: "col" }, el("span", { class: "hidden", text: "measure" })), el("th", { scope: "col", class: "n", text: "at first" }), el("th", { scope: "col" }, el("span", { class: "hidden", text: "curve" })), el("th", { scope: "col", class: "n", text: "now" }));
  return el("div", { id: "by-step" }, el("h3", { text: several ? "Answer length and each reward" : "Answer length" }), el("table", { class: "bells small" }, el("caption", { class: "hidden", text: `Training answers of ${node} by step` }), el("thead", {}, head), el("tbody", {}, ...lines.map(line))),
    el("p", { class: "small soft" }, `At first and now: mean of the first and of the last ${sizes} steps. Length in tokens.${several && rewards.length > REWARDS_SHOWN ? ` ${REWARDS_SHOWN} of ${rewards.length} rewards are shown here. ` : " "}`, el("a", { href: route("node", node), text: "Larger curves" })));
}

/** What is done before the first step, and what comes next. */
function beforeTheFirstStep({ row, node }) {
  const loads = !row && /loads the model|^$/.test(node?.words || "");
  const steps = [[loads ? "◔" : "✓", "The model is loaded"], [row ? "✓" : loads ? "○" : "◔", row && baseOf(row) && !row.by_reward ? `Base score: ${rightOf(baseOf(row))} right (${ratio(row.base)})` : "Held-out questions are answered before training"], [row ? "◔" : "○", "First answers are written and scored"], ["○", "First step"]];
  return el("ol", { class: "steps" }, ...steps.map(([mark, text]) => el("li", { class: mark === "○" ? "soft" : "" }, el("span", { class: `m ${mark === "✓" ? "right" : ""}`, "aria-hidden": "true", text: mark }), el("span", { class: "hidden", text: { "✓": "Done: ", "◔": "Going on: ", "○": "Next: " }[mark] }), text)));
}

function choiceOf(names, mine) {
  const choose = (node) => { chosen.node = node; chosen.questions = ""; again(); };
  if (names.length > 5) return select("node", names.map((each) => [each, each]), mine, choose, { "aria-label": "Node" });
  return el("div", { class: "switch", role: "group", "aria-label": "Node" }, ...names.map((each) => el("button", { type: "button", id: `node-${each}`, "aria-pressed": String(each === mine), onclick: () => choose(each) }, name(each))));
}

/** Is my model getting better? */
function answerSection(told, seen, mine) {
  const [title, sentence] = answer(told, seen), { row, alike, names, node } = seen, begins = told.state === "starting" && !(node?.step > 0);
  const others = alike.filter((each) => each !== row).length, what = row?.by_reward ? "Mean reward of held-out questions" : "Right answers to held-out questions";
  const choice = names.length > 1 ? el("div", { class: "end" }, choiceOf(names, seen.name)) : null;
  const drawn = row ? [heldOutChart(seen), el("figcaption", { class: "small soft" }, begins && !row.by_reward ? "The dashed line is the score to beat." : row.by_reward ? `Mean reward over ${many(row.n, "question")}.` : `Share of ${many(row.n, "question")}. Band: 95 % interval${others ? " of " : ""}`, others && !row.by_reward && !begins ? name(row.node) : null, row.by_reward || begins ? "" : ".", others > OTHERS_MOST ? ` ${OTHERS_MOST} of ${others} others are drawn.` : ""), evaluationTable(seen)] : [el("p", { class: "soft", text: told.state === "ended" ? "No held-out score is on record." : "The curve begins with the base policy's score." })];
  const notes = (told.nodes || []).flatMap((each) => (each.notes || []).map((words) => el("p", {}, ...(names.length > 1 ? [name(each.node), ": "] : []), ...worded(words)))).slice(0, 3);
  return el("section", { id: "answer", "aria-labelledby": "answer-title" },
    el("div", { class: "lead" }, el("div", {}, el("h1", { id: "answer-title", text: title }), sentence ? el("p", { class: "soft", text: sentence }) : null), progress(told, seen)),
    el("div", { class: "pair" }, el("figure", { class: "sheet" }, el("div", { class: "head" }, el("h2", { text: what }), choice), ...drawn), el("div", {}, row ? figures(seen) : null, begins ? beforeTheFirstStep(seen) : mine ? trainingReward(mine, seen) : null, begins || !mine ? null : byStep(mine, seen.name))),
    notes.length ? el("div", { class: "notes small warn" }, ...notes) : null);
}

/** What to do with a run that has ended. */
function homeSection({ ended }) {
  if (!ended) return null;
  const copy = (text) => el("button", { type: "button", "aria-label": `Copy: ${text}`, text: "Copy", onclick: ({ target }) => { navigator.clipboard?.writeText(text); target.textContent = "Copied"; } });
  return section("home", "Take it home", el("ul", { class: "do" }, ...ended.next.map(([what, command]) => el("li", {}, el("span", { text: what[0].toUpperCase() + what.slice(1) }), el("code", { text: command }), command.startsWith("swarm") || command.startsWith("cd") ? copy(command) : null))), el("p", { class: "hint" }, ...worded(`${ended.words[0].toUpperCase()}${ended.words.slice(1)}. This is from its records; none of its processes is running.`)));
}

const KINDS_OF_ANSWER = { kept: "Right before and now", learned: "Newly right", missing: "Still wrong", lost: "Newly wrong" };
const passedOf = (one) => one?.[2] ?? null;
const kindOf = ({ before, now }) => (passedOf(now) ? (passedOf(before) ? "kept" : "learned") : passedOf(before) ? "lost" : "missing");
/** Of a long question its last paragraph, in which the tasks of one dataset differ. */
const shortened = (text) => { const whole = text.trim(), parts = whole.split(/\n\s*\n/); const last = whole.length > 150 && parts.length > 1 ? parts.at(-1) : whole; return last.length > 240 ? `… ${last.slice(-220)}` : last; };

function judged(one, unscored = false) {
  if (!one) return el("span", { class: "soft small", text: "not on record" });
  const [text, reward, passed, parts, bonus] = one, kind = unscored ? "scored" : reward === null ? "unknown" : passed === null ? "scored" : passed ? "right" : reward > 0 && !bonus ? "part" : "wrong";
  const [mark, words] = { right: ["✓", "Right: "], wrong: ["✗", "Wrong: "], part: ["◐", "Part of the reward: "], scored: ["–", ""], unknown: ["?", "Reward unknown: "] }[kind];
  const each = Object.entries(parts || {}).map(([reward, value]) => `${reward} ${value === null ? "does not apply" : ratio(value, 2)}`);
  const told = [bonus ? `wrong; ${bonus}` : reward !== null && (kind === "part" || kind === "scored") ? `reward ${ratio(reward, 2)}` : kind === "unknown" ? "its reward is unknown" : "", each.join(", ")].filter(Boolean).join(": ");
  return el("div", { class: `verdict ${kind}` }, el("span", { class: "m", "aria-hidden": "true", title: words.replace(": ", ""), text: mark }), el("span", {}, el("span", { class: "hidden", text: words }), el("span", { class: "say", dir: "auto", text: text.trim().replace(/\n\s*\n+/g, "\n") || "(empty)" })), told ? el("small", { text: told }) : null);
}

/** What does it say? The same held-out questions before training and now. */
function saysSection(told, { name: mine, node, row, names }, answers) {
  if (!answers?.rows.length) return section("says", "What it says", el("p", { class: "hint", text: node?.kind === "elsewhere" ? "What nodes on other machines answer cannot be read here." : isDone(told) || row?.version ? "No held-out answer of it is on record on this machine (samples.jsonl)." : "Its answers to held-out questions appear here with its evaluations." }));
  const trained = answers.version > 0, rows = answers.rows.map((each) => ({ ...each, kind: kindOf(each) })), counted = trained && rows.every(({ before, now }) => passedOf(before) !== null && passedOf(now) !== null);
  const kinds = Object.keys(KINDS_OF_ANSWER), sizes = Object.fromEntries(kinds.map((kind) => [kind, rows.filter((each) => each.kind === kind).length]));
  if (!counted || !sizes[chosen.questions]) chosen.questions = "";
  const fit = chosen.questions ? rows.filter(({ kind }) => kind === chosen.questions) : rows, stride = Math.max(1, Math.floor(fit.length / QUESTIONS_FIRST));
  const mixed = [...Array(stride).keys()].flatMap((offset) => fit.filter((_, index) => index % stride === offset)), of_kind = (...wanted) => mixed.filter(({ kind }) => wanted.includes(kind)), [learned, lost] = [of_kind("learned"), of_kind("lost")];
  const spread = counted ? [...[...mixed.keys()].flatMap((at) => [...learned.slice(at, at + 1), ...lost.slice(at, at + 1)]), ...of_kind("kept", "missing")] : mixed, shown = spread.slice(0, QUESTIONS_FIRST + chosen.more);
  const dot = (kind) => svg("svg", { class: "dot", viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("rect", { class: `key-${kind}`, width: 10, height: 10, rx: 2 }));
  const tab = (kind, text, size) => el("button", { type: "button", id: `questions-${kind || "all"}`, "aria-pressed": String(chosen.questions === kind), disabled: kind && !size, onclick: () => { chosen.questions = kind; chosen.more = 0; again(); } }, kind ? dot(kind) : null, `${text} `, el("b", { text: count(size) }));
  const stack = svg("svg", { class: "stack", viewBox: `0 0 ${rows.length} 1`, preserveAspectRatio: "none", "aria-hidden": "true" });
  let at = 0;
  for (const kind of kinds) { stack.append(svg("rect", { class: `key-${kind}`, x: at, width: sizes[kind], height: 1 })); at += sizes[kind]; }
  const asked = ({ question }) => { const brief = shortened(question); return el("th", { scope: "row" }, el("span", { class: "ask", dir: "auto", text: brief || "(an empty question)" }), brief === question.trim() ? null : el("details", { class: "small" }, el("summary", { class: "soft", text: "whole question" }), el("span", { class: "say", dir: "auto", text: question.trim() }))); };
  const line = (each) => el("tr", {}, asked(each), el("td", { "data-head": "before" }, judged(each.before, answers.other_reward)), trained ? el("td", { "data-head": "now" }, judged(each.now)) : null, el("td", { "data-head": "reference" }, el("span", { class: "say", dir: "auto", text: each.reference ?? "–" })));
  const head = ["Question", "Before training", ...(trained ? [`Now, step ${count(answers.version)}`] : []), "Reference"];
  const of = row && row.n > rows.length ? ` ${count(rows.length)} of the ${count(row.n)} held-out questions are on record.` : "", other = answers.other_reward ? " The answers before training were scored by another reward, which is not shown." : "";
  return section("says", null,
    el("div", { class: "head" }, el("h2", { id: "says-title" }, "What it says", names.length > 1 ? el("span", { class: "small soft" }, " ", name(mine)) : null), counted ? el("div", { class: "counts", role: "group", "aria-label": "Which questions" }, tab("", "All", rows.length), ...kinds.map((kind) => tab(kind, KINDS_OF_ANSWER[kind], sizes[kind]))) : null),
    counted ? stack : null,
    el("table", { class: "qa" }, el("caption", { class: "hidden", text: "The same held-out question before training and now" }), el("colgroup", {}, el("col", { class: "c-question" }), trained ? el("col", { class: "c-before" }) : el("col"), trained ? el("col") : null, el("col", { class: "c-reference" })), el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col", text })))), el("tbody", {}, ...shown.map(line))),
    el("p", { class: "tools" }, spread.length > shown.length ? el("button", { type: "button", id: "more", text: `Show ${Math.min(QUESTIONS_MORE, spread.length - shown.length)} more`, onclick: () => { chosen.more += QUESTIONS_MORE; again(); } }) : null, of || other ? el("span", { class: "small soft", text: `${of}${other}` }) : null));
}

const measureOf = ({ k, by_reward: byReward }) => (byReward ? "mean reward" : k === 1 ? "share right" : `avg@${k}`);

/** One evaluation set's curve: avg@k with its 95 % interval, pass@k dotted, and the base policy's avg@k dashed. */
function setChart({ name: set, k, by_reward: byReward, base, curve, questions }, steps) {
  const page = Math.min(1232, document.documentElement.clientWidth) - 32, columns = Math.max(1, Math.floor((page + 16) / 356)), width = Math.round((page - 16 * (columns - 1)) / columns) - (page > 568 ? 38 : 18);
  const height = 130, left = 36, high = 9, low = 22, end = Math.max(steps, curve.at(-1)[0], 1), bounds = ([, value, error]) => (byReward ? [value - 1.96 * error, value + 1.96 * error] : interval([0, value, error ? (value * (1 - value)) / (error * error) : questions]));
  const values = curve.flatMap((point) => [...bounds(point), ...(point[3] === null ? [] : [point[3]])]), least = Math.min(0, ...values), most = ceiling(Math.max(...values)), last = curve.at(-1), over = last[3] !== null;
  const room = over && curve.length > 1 && (1 - last[0] / end) * (width - left - 16) < 62 ? 66 : 14, x = (version) => left + (version / end) * (width - left - room), y = (value) => high + ((most - value) / (most - least)) * (height - high - low);
  const measure = measureOf({ k, by_reward: byReward }), spoken = `${measure} on set ${set} by step: ${curve.slice(-12).map(([version, value, , passed]) => `${ratio(value)}${passed === null ? "" : ` (pass@${k} ${ratio(passed)})`} at step ${version}`).join(", ")}.${base ? ` Before training ${ratio(base[1])}.` : ""}`;
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spoken }), path = (points) => points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
  for (const level of [...new Set([least, 0, most])]) picture.append(svg("line", { class: level ? "grid" : "axis", x1: left, x2: width - room, y1: y(level), y2: y(level) }), label_at(String(Number(level.toPrecision(3))), left - 7, y(level) + 4.5, "end"));
  for (const step of [0, end]) picture.append(label_at(step === 0 ? "step 0" : count(step), x(step), height - 4, step === 0 ? "start" : "end"));
  if (curve.length > 1) picture.append(svg("polygon", { class: "band", points: path([...curve.map((point) => [point[0], bounds(point)[1]]), ...curve.toReversed().map((point) => [point[0], bounds(point)[0]])]) }));
  if (base && curve.length > 1) picture.append(svg("line", { class: "base", x1: left, x2: width - room, y1: y(base[1]), y2: y(base[1]) }));
  if (over) picture.append(svg("polyline", { class: "most", points: path(curve.map(([version, , , passed]) => [version, passed])) }));
  picture.append(svg("polyline", { class: "line", points: path(curve) }), ...curve.map((point) => svg("circle", { class: "line", cx: x(point[0]).toFixed(1), cy: y(point[1]).toFixed(1), r: 3 })));
  if (curve.length === 1) {
    picture.append(svg("line", { class: "whisker", x1: x(last[0]), x2: x(last[0]), y1: y(bounds(last)[0]), y2: y(bounds(last)[1]) }));
    if (over) picture.append(svg("circle", { class: "odot", cx: x(last[0]), cy: y(last[3]), r: 3 }));
  } else if (over) for (const label of apart([[`avg@${k}`, x(last[0]) + 8, y(last[1]) + 4.5, "start", "on"], [`pass@${k}`, x(last[0]) + 8, y(last[3]) + 4.5, "start"]], height - low)) picture.append(label_at(...label));
  return picture;
}

/** The evaluation sets ([[eval.sets]]) of the chosen node: before, now and gain, by avg@k and pass@k. */
function setsSection({ steps, over, name: mine, names, node }, told) {
  if (!told?.sets?.length) return null;
  const card = (each) => {
    const { k, base, curve } = each, now = curve.at(-1), trained = now[0] > 0, several = now[3] !== null, before = base && trained, atEnd = over && now[0] >= (node?.step || 0);
    const line = (title, step, cells, kind = "") => el("tr", { class: kind }, el("th", { scope: "row" }, title, step === null ? null : el("span", { class: "note", text: ` step ${count(step)}` })), ...cells.map((text) => el("td", { class: "n", text })));
    const of = (point, digits = ratio) => [digits(point[1]), ...(several ? [digits(point[3])] : [])];
    const lines = [line(!trained ? "Before" : atEnd ? "At the end" : over ? "Last result" : "Now", trained && !atEnd ? now[0] : null, of(now)), before ? line("Before", null, of(base)) : null, before ? line("Gain", null, of([0, now[1] - base[1], 0, several && base[3] !== null ? now[3] - base[3] : null], signed), "gain") : null];
    const head = el("tr", {}, el("th", { scope: "col" }, el("span", { class: "hidden", text: "when" })), el("th", { scope: "col", class: "n", text: measureOf(each) }), several ? el("th", { scope: "col", class: "n", text: `pass@${k}` }) : null);
    const notes = [`${many(each.questions, "question")}, ${many(k, "answer")} to each.`, each.chance === null ? "" : `Chance alone explains up to ${ratio(each.chance)}${several ? ` in avg@${k}` : ""}.`, trained || over ? "" : "A trained policy is measured later.", each.unknown ? `${many(each.unknown, "answer")} without a known reward.` : ""];
    return el("figure", { class: "sheet" }, el("div", { class: "head" }, el("h3", {}, name(each.name))), setChart(each, steps), el("table", { class: "figures" }, el("caption", { class: "hidden", text: `Results on set ${each.name}` }), el("thead", {}, head), el("tbody", {}, ...lines.filter(Boolean))), el("figcaption", { class: "small soft", text: notes.filter(Boolean).join(" ") }), each.added ? el("p", { class: "small warn", text: `It was ${each.added}.` }) : null);
  };
  return section("sets", null, el("h2", { id: "sets-title" }, "Evaluation sets", names.length > 1 ? el("span", { class: "small soft" }, " ", name(mine)) : null), el("p", { class: "hint", text: "Their questions are kept out of training. avg@k: share of right answers, with its 95 % interval; pass@k: chance that one of k is right. Dashed: before training." }), el("div", { class: "sets" }, ...told.sets.map(card)));
}

/** By task: before and now, where there are several. */
function tasksSection({ row }, mine) {
  const tasks = Object.entries(mine?.curves || {}).filter(([dataset]) => dataset);
  if (tasks.length < 2 || !row?.version) return null;
  const values = tasks.flatMap(([, points]) => [points[0][1], points.at(-1)[1]]), least = Math.min(0, ...values), most = Math.max(1, ...values), x = (value) => 4 + (78 * (value - least)) / (most - least);
  const picture = (from, to) => svg("svg", { viewBox: "0 0 86 16", "aria-hidden": "true" }, svg("line", { class: "grid", x1: 4, x2: 82, y1: 8, y2: 8 }), svg("line", { class: "line", x1: x(from), x2: x(to), y1: 8, y2: 8 }), svg("circle", { class: "odot", cx: x(from), cy: 8, r: 3.5 }), svg("circle", { class: "end", cx: x(to), cy: 8, r: 4 }));
  const line = ([task, points]) => { const first = points[0][0] === 0 ? points[0][1] : null, now = points.at(-1)[1]; return el("tr", {}, el("th", { scope: "row" }, name(task)), el("td", { class: "n", text: ratio(first, 2) }), el("td", { class: "pic" }, picture(first ?? now, now)), el("td", { class: "n" }, el("b", { text: ratio(now, 2) }))); };
  return section("tasks", "By task", el("table", { class: "bells small" }, el("caption", { class: "hidden", text: "Held-out scores by task, before and now" }), el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "task" }), el("th", { scope: "col", class: "n", text: "before" }), el("th", { scope: "col" }, el("span", { class: "hidden", text: "from before to now" })), el("th", { scope: "col", class: "n", text: "now" }))), el("tbody", {}, ...tasks.map(line))));
}
