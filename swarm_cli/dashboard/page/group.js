// A step's groups, and one group with its completions side by side.
"use strict";

/** A group in a list: its question, its nodes, and the reward of each answer. `seen`: the swarm's state, with its time and nodes; `stands`: nothing in the list is drawn again as time passes. */
function groupLine(group, seen = null, stands = true) {
  const local = group.sender === group.taker;
  const whose = local ? el("span", { text: "local" }) : el("span", {}, "from ", name(group.sender));
  const facts = [el("span", {}, name(group.taker), ` step ${group.step}`), whose, name(group.dataset), el("span", { text: `policy version ${group.policy_version}` })];
  if (group.step > (seen?.nodes?.find(({ node }) => node === group.taker)?.step ?? group.step)) facts.push(el("span", { text: "not trained on yet" }));
  if (seen) facts.push(el("span", { text: stands ? timeOf(group.at) : `${ago(seen.now - group.at)} ago` }));
  return el("li", { class: "card" },
    el("p", { class: "facts" }, ...facts),
    el("p", {}, el("a", { class: "question", dir: "auto", href: route("group", group.taker, group.step, group.place), text: group.question || "(an empty question)" })),
    group.best ? el("p", { class: "best", dir: "auto" }, el("span", { class: "label", text: group.passed?.some(Boolean) ? "best answer " : new Set(group.rewards).size > 1 ? "highest reward " : "an answer " }), name(group.best)) : null,
    rewardsLine(group.rewards, group.passed, group.completions, group.left, local));
}

const NO_PASS = "no pass is defined: set pass_at in its [[tasks]] entry";

/** `passed`: whether each answer passes; null where no pass is defined, so that no answer is called right or wrong. `left`: how many answers left the group, and why. `local`: its rewards are the verifier's; those of a foreign group's other answers are what they count. */
function rewardsLine(rewards, passed, completions, left, local) {
  const gone = left ? `; ${left}` : "";
  if (!passed) return el("p", { class: "rewards", text: `mean reward ${ratio(mean(rewards), 2)} of ${many(completions, "answer")} (${NO_PASS})${gone}` });
  const full = passed.filter(Boolean).length;
  const marks = rewards.map((reward, index) => el("span", { class: passed[index] ? "right" : reward > 0 ? "warn" : "soft", text: passed[index] ? "●" : reward > 0 ? "◐" : "○" }));
  const more = completions > rewards.length ? ` of ${count(completions)}` : "";
  return el("p", { class: "rewards" }, el("span", { class: "marks", "aria-hidden": "true", title: "● right, ◐ part of the reward, ○ wrong" }, ...marks), ` ${full} right of ${rewards.length} shown${more}${local ? `, mean reward ${ratio(mean(rewards), 2)}` : ""}${gone}`);
}

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

async function showStep(node, step) {
  const told = await get("step.json", { node, step });
  document.title = `${node} step ${step} · swarm`;
  const others = [step > 1 ? el("a", { href: route("step", node, step - 1), text: "step before" }) : null, el("a", { href: route("step", node, step + 1), text: "step after" })];
  return [
    trail(["node", node], [`step ${step}`]),
    el("h1", {}, "Step ", String(step), " of ", name(node)),
    el("p", { class: "facts" }, el("span", { text: `batch made ${timeOf(told.at)}` }), el("span", { text: many(told.groups.length + told.left_out, "group") }), ...others.filter(Boolean)),
    el("ul", { class: "cards" }, ...told.groups.map((group) => groupLine(group))),
    told.left_out ? el("p", { class: "hint", text: `${many(told.left_out, "more group")} not shown: swarm rollouts ${node} --step ${step}` }) : null,
  ];
}

async function showGroup(node, step, place) {
  const told = await get("group.json", { node, step, place });
  document.title = `${told.file || told.dataset}, ${node} step ${step} · swarm`;
  const foreign = told.origin === "foreign";
  const facts = [
    ["Whose", foreign ? el("span", {}, "foreign, from ", name(told.sender)) : el("span", {}, "local, of ", name(told.sender))],
    ["Dataset", el("span", {}, told.file ? name(told.file) : null, told.file ? ", " : null, name(told.dataset), ` seed ${told.seed} index ${told.index}`)],
    ["Sampled by", el("span", {}, name(told.model), ` policy version ${told.policy_version}`)],
    ["Staleness", told.staleness === null ? `${ago(told.age_s)} old` : many(told.staleness, "version")],
    ["Chosen", told.why],
    ["Judged by", el("span", {}, name(told.judged_by))],
    ["Trained on", told.training ? told.used : told.waits ? `not yet: its batch waits for its step (for groups that were: swarm rollouts ${node} --trained)` : "not on record on this machine"],
  ];
  const links = [
    told.place > 0 ? el("a", { href: route("group", node, step, told.place - 1), text: "group before" }) : null,
    told.place + 1 < told.places ? el("a", { href: route("group", node, step, told.place + 1), text: "group after" }) : null,
  ];
  return [
    trail(["node", node], [`step ${step}`, route("step", node, step)], [`group ${place}`]),
    el("h1", {}, "Group ", String(place), " of step ", String(step)),
    el("p", { class: "facts" }, ...links.filter(Boolean)),
    el("dl", {}, ...facts.map(([what, is]) => el("div", {}, el("dt", { text: what }), el("dd", {}, is)))),
    el("h2", { text: "Question" }), el("pre", { dir: "auto", tabindex: "0", "aria-label": "Question", text: told.question }),
    told.reference === null ? null : el("h2", { text: "Reference answer" }),
    told.reference === null ? null : el("pre", { dir: "auto", tabindex: "0", "aria-label": "Reference answer", text: told.reference }),
    el("h2", { text: many(told.completions.length + told.completions_left_out, "completion") }),
    told.left ? el("p", { class: "hint", text: `${told.left}. The verifier's log says why their rewards are unknown.` }) : null,
    told.completions.some(({ heat }) => heat) ? heatChoice(told.completions) : el("p", { class: "hint", text: "The sender did not share token ids and logprobs, so tokens cannot be coloured." }),
    el("div", { class: "side" }, ...told.completions.map(completionCard)),
    told.completions_left_out ? el("p", { class: "hint", text: `${many(told.completions_left_out, "more completion")} not shown: swarm rollouts ${node} --step ${step}` }) : null,
  ];
}

function completionCard(completion) {
  const id = `completion-${completion.place}`, right = completion.passed, bonus = completion.judged.marks.startsWith("wrong; "), part = completion.reward > 0 && !bonus;
  const earned = el("p", { class: right ? "right" : right === false && !part ? "wrong" : "" }, `${right === null ? "–" : right ? "✓" : part ? "◐" : "✗"} ${completion.judged.replaced || bonus ? completion.judged.marks : `${part && !right ? "part of the " : ""}reward ${ratio(completion.reward, 2)}`} · ${many(completion.tokens, "token")} · ended by ${completion.finish_reason}`);
  const judged = completion.judged.read_as === null ? "the whole text" : completion.judged.read_as || "(nothing)";
  return el("article", { class: "card", "aria-labelledby": id },
    el("h3", { id, text: `Completion ${completion.place}` }), earned,
    el("p", { class: "facts" }, el("span", {}, "judged: ", name(judged))),
    ...Object.entries(completion.parts).map(([reward, value]) => el("p", { class: "facts" }, el("span", {}, name(reward), ` ${value === null ? "does not apply" : ratio(value, 2)}`))),
    completion.training ? el("p", { class: "facts" }, trainedOn(completion.training)) : null,
    completion.heat?.texts ? heatText(completion) : el("pre", { dir: "auto", tabindex: "0", "aria-labelledby": id, text: completion.text || "(empty)" }),
    completion.heat ? tokenTable(completion) : null);
}

/** The ways to colour tokens. Each level has a mark besides its colour; `of` returns a token's level, null if nothing is on record. */
const HEATS = {
  logprob: {
    intro: "Colour of a token: its probability under the policy that sampled it (behaviour logprob):",
    levels: [["heat-0", "likely"], ["heat-1", "under 0.9"], ["heat-2", "under 0.5"], ["heat-3", "under 0.1"], ["heat-4", "under 0.01"]],
    of: ({ logprob }, index) => [0.9, 0.5, 0.1, 0.01, 0].findIndex((least) => Math.exp(logprob[index]) >= least),
  },
  ratio: {
    intro: "Colour of a token: its probability under the trainer's policy before the step, compared with the policy that sampled it:",
    levels: [["less-2", "under half as likely"], ["less-1", "under 0.8"], ["heat-0", "about as likely"], ["more-1", "over 1.25"], ["more-2", "over twice as likely"]],
    of: ({ ratio: of }, index) => (typeof of?.[index] !== "number" ? null : [0.5, 0.8, 1.25, 2, Infinity].findIndex((most) => of[index] < most || most === Infinity)),
  },
  weight: {
    intro: "Colour of a token: the factor that multiplied its loss:",
    levels: [["weight-0", "0: no part in the loss"], ["weight-1", "under 0.5"], ["weight-2", "under 0.9"], ["heat-0", "about 1"], ["more-1", "over 1.1"]],
    of: ({ weight }, index) => (typeof weight?.[index] !== "number" ? null : weight[index] === 0 ? 0 : [0.5, 0.9, 1.1, Infinity].findIndex((most) => weight[index] < most || most === Infinity) + 1),
  },
};
const CUT = ["cut", "less than its ratio"], UNKNOWN = ["unknown", "not on record"];
let heatBy = "logprob";

const isCut = ({ ratio: of, weight }, index) => typeof weight?.[index] === "number" && weight[index] > 0 && weight[index] < 0.995 * of?.[index];

/** The marks of one token: its level and, when colouring by weight, whether its weight was cut below its ratio. */
function marksOf(heat, index, by) {
  const level = HEATS[by].of(heat, index), mark = level === null ? UNKNOWN[0] : HEATS[by].levels[level][0];
  return by === "weight" && isCut(heat, index) ? `${mark} ${CUT[0]}` : mark;
}

/** How the step used one answer: its advantage and, if the objective has weights, the mean weight of its tokens. */
function trainedOn({ advantage, weight, clipped, left_out: leftOut }) {
  const number = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });
  const parts = [`advantage ${typeof advantage === "number" ? number(advantage) : "unknown"}`];
  if (leftOut) parts.push(`left out: ${leftOut}`);
  if (typeof weight === "number") parts.push(`mean weight ${number(weight)}`);
  if (clipped) parts.push(`${number(clipped)} ${clipped === 1 ? "token" : "tokens"} clipped`);
  return parts.join(" · ");
}

/** The trainer's ratio and weight of one token, if they are on record. */
const usedOf = (heat, index) => ["ratio", "weight"].filter((measure) => typeof heat[measure]?.[index] === "number").map((measure) => `, ${measure} ${heat[measure][index].toPrecision(3)}`).join("");

function heatText({ heat, place }) {
  const tokens = heat.texts.map((text, index) => el("span", { class: "token", title: `logprob ${heat.logprob[index].toFixed(3)}, probability ${Math.exp(heat.logprob[index]).toPrecision(2)}${usedOf(heat, index)}`, text: text.replaceAll("\\n", "↵\n") }));
  const shown = el("pre", { class: "tokens", dir: "auto", tabindex: "0", "aria-labelledby": `completion-${place}` }, ...tokens, heat.left_out ? ` … ${many(heat.left_out, "more token")}` : null);
  shown.paint = (by) => tokens.forEach((token, index) => token.setAttribute("class", `token ${marksOf(heat, index, by)}`));
  shown.paint(heatBy);
  return shown;
}

/** The choice of a colouring, and the meaning of its colours and marks. A colouring without any record cannot be chosen. */
function heatChoice(completions) {
  const heats = completions.map(({ heat }) => heat).filter(Boolean);
  const known = Object.keys(HEATS).filter((by) => by === "logprob" || heats.some((heat) => heat[by]?.some((value) => typeof value === "number")));
  if (!known.includes(heatBy)) heatBy = "logprob";
  const meaning = el("p", { class: "hint", id: "heat-legend", "aria-live": "polite" });
  const explain = () => meaning.replaceChildren(...heatLegend(heats, heatBy));
  const choices = Object.keys(HEATS).map((by) => {
    const choose = () => { heatBy = by; explain(); document.querySelectorAll("pre.tokens").forEach((each) => each.paint(by)); };
    return el("label", {}, el("input", { type: "radio", name: "heat", value: by, checked: by === heatBy, disabled: !known.includes(by), onchange: choose }), ` ${by}${known.includes(by) ? "" : " (not on record)"}`);
  });
  explain();
  return el("div", {}, el("fieldset", { class: "heat" }, el("legend", { text: "Colour tokens by" }), ...choices), meaning);
}

function heatLegend(heats, by) {
  const marks = new Set(heats.flatMap((heat) => heat.logprob.map((_, index) => marksOf(heat, index, by))).flatMap((each) => each.split(" ")));
  const keys = [...HEATS[by].levels, ...[CUT, UNKNOWN].filter(([mark]) => marks.has(mark))].map(([mark, words]) => el("span", { class: `token ${mark}`, text: words }));
  return [`${HEATS[by].intro} `, ...keys.flatMap((key) => [key, " "])];
}

/** The same numbers as a table, for people who cannot see colours; with the trainer's ratios and weights if they are on record. */
function tokenTable({ heat, place }) {
  const measures = ["logprob", "ratio", "weight"].filter((measure) => Array.isArray(heat[measure]));
  const details = el("details", {}, el("summary", { text: "Tokens as a table" }));
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("table")) return;
    const head = el("tr", {}, ...["#", "token", ...measures].map((text) => el("th", { scope: "col", text })));
    const rows = heat.logprob.map((_, index) => el("tr", {}, el("th", { scope: "row", text: String(index) }), el("td", { class: "words" }, name(heat.texts ? heat.texts[index] : "not decoded here")), ...measures.map((measure) => el("td", { text: ratio(heat[measure][index]) + (measure === "weight" && heat.weight[index] === 0 ? ", no part" : measure === "weight" && isCut(heat, index) ? ", cut" : "") }))));
    details.append(scrolled(`Tokens of completion ${place}`, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))));
  });
  return details;
}

/** Links from this page up to the swarm. */
function trail(...steps) {
  const links = [el("a", { href: "#/", text: "swarm" }), ...steps.map(([text, address]) => (text === "node" ? el("a", { href: route("node", address) }, name(address)) : address ? el("a", { href: address, text }) : el("span", { "aria-current": "page", text })))];
  return el("nav", { "aria-label": "Where this is", class: "trail" }, el("ol", {}, ...links.map((link) => el("li", {}, link))));
}
