// The swarm's page: which nodes learn, whose groups they train on, questions and answers. All data comes from this machine's dashboard.
"use strict";

const REFRESH_MS = 5000, HELD_MS = 5000, MATRIX_MOST = 24;
const chosen = { node: "", questions: "", more: 0, dataset: "", texts: "", held: false, fold: null };
let timer = 0, shown = "", round = 0;

/** Each state of the swarm: its sign, its name, and what a person can do about it. */
const STATES = {
  waiting: ["…", "No run here yet", "No server answers there yet. Start a run in another terminal; it appears here within seconds."],
  lost: ["!", "The server does not answer", "The page shows what was seen last, and keeps trying."],
  unstored: ["!", "Every process waits for the server", ""],
  emptied: ["!", "The server came back with an empty store", ""],
  empty: ["○", "No run here yet", "The server answers, but no node has written to it. Start a run in another terminal; it appears here within seconds."],
  starting: ["◔", "Starting", "The processes are loading their models and evaluating the base policy before the first step. A toy needs a minute, a large model several."],
  running: ["●", "Running", ""],
  unread: ["?", "The nodes' state cannot be read", "They may be well. `swarm status` says why, and what to do."],
  finished: ["✓", "Finished", "Every node here has taken its steps."],
  stopped: ["■", "Stopped", "The nodes here were stopped before their last step. `swarm up --run NAME` continues the run."],
  ended: ["■", "The run has ended", ""],
  failed: ["!", "A process is gone", "It fell silent without ending in order, or was given up."],
};
/** A swarm that runs with something wrong: by a node's `trouble`. */
const TROUBLES = {
  unanswered: ["△", "A process does not answer", "It may only be late, as on a busy machine. It counts as gone when nothing is heard of it for 30 s."],
  dying: ["△", "A process dies again and again", "It is started again each time, after a longer pause; one that dies 8 times in 2 minutes is given up. Its log and `up.log` in the run's folder say why."],
  unscored: ["△", "No group is scored", "Without a known reward there is nothing to train on. The verifier's log says why the rewards are unknown; `swarm config check` tries the verifier."],
  still: ["△", "A node stands still", "Its processes answer, but its work does not go on. `swarm top` shows what waits for what."],
};
const ALARMS = { lost: "bad", unstored: "bad", emptied: "bad", failed: "bad", unread: "warn" };
const KINDS = { running: "● running", finished: "✓ finished", starting: "◔ starting", stopped: "■ stopped", silent: "! silent", lost: "! streams lost", unread: "? not read", elsewhere: "○ elsewhere" };

/** Text in which the parts between backquotes are shown as code. */
const worded = (text) => text.split("`").map((part, index) => (index % 2 ? el("code", { text: part }) : part));

const troubleOf = (told) => (told.state === "running" && Object.keys(TROUBLES).find((each) => told.nodes.some((node) => node.trouble === each))) || "";

/** What is wrong, with its remedy; nothing if all is well. */
function banner(told) {
  const trouble = troubleOf(told), broke = told.state === "ended" && told.ended && !told.ended.in_order;
  const kind = broke ? "bad" : trouble ? "warn" : ALARMS[told.state], apart_ = told.swarm_reachable === false ? el("p", { text: "The swarm plane cannot be reached: nodes train alone until it is back." }) : told.swarm_problem ? el("p", {}, el("bdi", { text: told.swarm_problem })) : null;
  if (!kind) return apart_ || told.problem ? el("div", { class: "banner warn" }, apart_, told.problem ? el("p", {}, el("bdi", {}, ...worded(told.problem))) : null) : null;
  const [sign, title, words] = broke ? ["!", "The run broke off", told.ended.words] : TROUBLES[trouble] || STATES[told.state];
  const unwell = (node) => (told.state === "failed" ? node.kind === "silent" : trouble && node.trouble === trouble);
  return el("div", { class: `banner ${kind}` },
    el("p", {}, el("b", {}, el("span", { "aria-hidden": "true", text: `${sign} ` }), `${title}. `), ...worded(words)),
    told.state === "failed" || trouble ? el("p", {}, ...wrong(told.nodes.filter(unwell))) : null,
    ...(told.state === "failed" ? remedies(told, told.nodes.filter(unwell).flatMap(({ away }) => away)) : []),
    told.problem ? el("p", {}, el("bdi", {}, ...worded(told.problem))) : null, apart_);
}

/** The page before there is anything to show. */
function nothingYet(told) {
  const [, title, words] = STATES[told.state], ways = [["A demo of two minutes", "swarm up"], ["Your own model and data", "swarm new"], ["A run that has ended", "swarm dashboard --run NAME"]];
  return el("section", { id: "answer", "aria-labelledby": "answer-title" }, el("div", { class: "lead" }, el("div", {}, el("h1", { id: "answer-title", text: title }), el("p", { class: "soft" }, ...worded(words)))),
    el("ul", { class: "do" }, ...ways.map(([what, command]) => el("li", {}, el("span", { text: what }), el("code", { text: command })))), el("p", { class: "facts" }, told.server ? el("span", {}, "server ", name(told.server)) : null, told.problem ? el("span", {}, el("bdi", {}, ...worded(told.problem))) : null));
}

/** What is wrong with which nodes; at most three of them. */
function wrong(found) {
  const each = found.slice(0, 3).flatMap(({ node, words }) => ["; ", name(node), `: ${words}`]).slice(1);
  return [...each, found.length > 3 ? `; and ${many(found.length - 3, "more node")}` : ""];
}

/** How to start processes that are gone again and where their last words are: on this machine, in a cluster, or where neither is known. */
function remedies({ cluster }, away) {
  const here = away.filter(({ log }) => log), more = here.length > 3 ? el("p", { text: `And ${many(here.length - 3, "more process", "more processes")}.` }) : null;
  if (here.length) return [...here.slice(0, 3).map(({ again, log }) => el("p", {}, ...worded(`${again}; its last words are in \`${log}\`.`))), more];
  const role = away[0] ? away[0].process.slice(away[0].process.lastIndexOf("-") + 1) : "ROLE", node = away[0] ? away[0].process.slice(0, -role.length - 1) : "NODE";
  if (cluster) return [el("p", {}, ...worded(`Its last words: \`kubectl -n swarm logs -l app.kubernetes.io/component=${role},swarm-rl.dev/node=${node}\`.`))];
  return [el("p", {}, ...worded(`On the machine where it runs, \`swarm restart ${node}-${role}\` starts it again, and its last words are in \`${node}/${role}.log\` in the run's folder.`))];
}

const STANDINGS = { signed: "✓ signed", unsigned: "? unsigned", "badly signed": "✗ badly signed", none: "○ no entry" };
const standing = (what, problem) => el("span", { class: what === "badly signed" ? "bad" : what === "unsigned" ? "warn" : "", text: (STANDINGS[what] || `✓ ${what}`) + (problem ? `: ${problem}` : "") });

/** All nodes by gain, if there are several. */
function leaderboardSection(told) {
  const rows = told.leaderboard || [];
  if (rows.length < 2) return null;
  const sets = new Map(), hub = isHub(told);
  for (const row of rows) {
    const key = row.trusted ? `${row.set} ${row.scorer} ${row.n}` : "untrusted";
    sets.set(key, [...(sets.get(key) || []), row]);
  }
  const tables = [...sets].map(([key, same]) => leaderboardTable(key === "untrusted" ? null : same[0], same, hub));
  return section("leaderboard", "Nodes by gain", el("p", { class: "hint", text: `Gain in held-out pass rate over the base policy; in mean reward where no pass is defined.${sets.size > 1 ? " Only scores on the same held-out set, by the same scorers, can be compared." : ""}${hub ? " Nodes evaluate themselves and sign their reports." : ""}` }), ...tables, leftOut(told.rows_left_out, "row"));
}

/** Whether others than this server's nodes are here, or somebody has signed badly: then it matters who wrote what. */
const isHub = ({ nodes = [], leaderboard = [] }) => nodes.some(({ kind, problem }) => kind === "elsewhere" || problem) || leaderboard.some(({ trusted }) => !trusted);

/** Of how many answers a score is, where the reward of some is unknown. */
const ofAnswers = ({ n, unknown }) => `${count(n - unknown)} of ${many(n, "held-out answer")}; ${count(unknown)} ${unknown === 1 ? "has" : "have"} no known reward`;

/** By which scorers, since only scores of the same ones can be compared. */
const scoredBy = ({ scorer }) => (scorer ? `, scorers ${scorer}` : "");

function leaderboardTable(set, rows, hub) {
  const caption = set ? `${hub ? `Held-out set ${set.set || "of unknown id"}, ` : ""}${many(set.n, "task")}${hub ? scoredBy(set) : ""}${rows.some((row) => row.by_reward) ? `, mean reward (${NO_PASS})` : ""}` : "Not ranked: nothing proves which node wrote these";
  const head = ["rank", "node", "gain", "newest", "base", "version", "curve", ...(hub ? ["signature"] : [])];
  const lines = rows.map((row, index) => stacked(head,
    el("td", { text: set ? String(index + 1) : "–" }),
    el("th", { scope: "row" }, el("a", { href: route("node", row.node) }, name(row.node)), hub && row.key ? el("small", { title: row.key, text: ` ${row.key.slice(0, 8)}` }) : null),
    el("td", { text: signed(row.gain) }), el("td", {}, ratio(row.newest), row.unknown ? el("small", { text: ` ${ofAnswers(row)}` }) : null), el("td", { text: ratio(row.base) }), el("td", { text: count(row.version) }),
    el("td", {}, spark(row.curve)), ...(hub ? [el("td", { class: "words" }, standing(row.standing))] : [])));
  return scrolled(caption, el("table", { class: "stacks" }, el("caption", { text: caption }), el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col", text })))), el("tbody", {}, ...lines)));
}

/** Who teaches whom, of three nodes or more: groups trained on, by sender (columns) and node (rows); beyond `MATRIX_MOST` names, those with fewest groups are added up as others. */
function exchangeSection(told) {
  const cells = told.exchange || [], nodes = new Set([...cells.flatMap(([taker, sender]) => [taker, sender]), ...(told.nodes || []).map(({ node }) => node)]);
  if (nodes.size < 3) return null;
  const notes = uncounted(told);
  if (!cells.length) return section("exchange", "Who teaches whom", el("p", { class: "hint", text: notes.length ? "No group was counted." : told.state === "ended" ? "No group was trained on." : "No group was trained on yet. Nodes on other servers cannot be seen here." }), ...notes);
  const intro = el("p", { class: "hint", text: "Groups that each node (rows) has trained on since its first step, by the node that sampled them (columns). A group counts once, and not if it had no effect, for example because its rewards are all equal." });
  const datasets = [...new Set(cells.map(([, , dataset]) => dataset))].sort();
  if (chosen.dataset && !datasets.includes(chosen.dataset)) chosen.dataset = "";
  const choice = el("p", {}, el("label", { for: "dataset", text: "Dataset " }), select("dataset", [["", "all"], ...datasets.map((dataset) => [dataset, dataset])], chosen.dataset, (value) => (chosen.dataset = value)));
  const wanted = cells.filter(([, , dataset]) => !chosen.dataset || dataset === chosen.dataset);
  return section("exchange", "Who teaches whom", intro, ...notes, choice, matrix(wanted), leftOut(told.exchange_left_out, "group"));
}

/** Whose groups are not counted, or only from a later step on. */
function uncounted({ exchange_since: since = {}, exchange_uncounted: nodes = [] }) {
  const lines = [
    [Object.entries(since).map(([node, step]) => `${node} from step ${step} on`), "The trainers' records do not tell of earlier steps. Counted: "],
    [nodes, "Not counted, as their trainers' records are not on this machine: "],
  ];
  const listed = (names) => names.slice(0, 8).join(", ") + (names.length > 8 ? ` and ${names.length - 8} more` : "");
  return lines.filter(([names]) => names.length).map(([names, words]) => el("p", { class: "hint", text: `${words}${listed(names)}.` }));
}

function matrix(cells) {
  const [takers, takerOf] = ranked(cells, 0), [senders, senderOf] = ranked(cells, 1);
  const sums = new Map();
  for (const [taker, sender, , groups] of cells) {
    const key = `${takerOf(taker)} ${senderOf(sender)}`;
    sums.set(key, (sums.get(key) || 0) + groups);
  }
  const most = Math.max(...sums.values());
  const line = (taker) => el("tr", {}, el("th", { scope: "row" }, taker === "…" ? "others" : el("a", { href: route("node", taker) }, name(taker))), ...senders.map((sender) => {
    const groups = sums.get(`${taker} ${sender}`) || 0;
    const cell = el("td", { class: `level-${groups ? Math.ceil((4 * groups) / most) : 0}`, text: groups ? count(groups) : "0" });
    if (taker === sender && taker !== "…") cell.append(el("small", { text: " local" }));
    return cell;
  }));
  const head = el("tr", {}, el("th", { scope: "col", text: "node" }), ...senders.map((sender) => el("th", { scope: "col" }, sender === "…" ? "others" : name(sender))));
  return scrolled("Groups by node and sender", el("table", { class: "matrix" }, el("caption", { text: "Groups trained on; the stronger the colour, the more" }), el("thead", {}, head), el("tbody", {}, ...takers.map(line))));
}

/** The names in one column of the cells with the most groups; and a function from each name to the one it is shown under. */
function ranked(cells, column) {
  const sums = new Map();
  for (const cell of cells) sums.set(cell[column], (sums.get(cell[column]) || 0) + cell[3]);
  const names = [...sums].sort(([, one], [, other]) => other - one).map(([each]) => each);
  const kept = new Set(names.slice(0, MATRIX_MOST));
  return [[...[...kept].sort(), ...(names.length > kept.size ? ["…"] : [])], (each) => (kept.has(each) ? each : "…")];
}

/** How many groups each node has trained on: its own, and others'. */
function trainedOnBy(told, node) {
  const sum = (cells) => cells.reduce((total, [, , , groups]) => total + groups, 0), mine = (told.exchange || []).filter(([taker]) => taker === node);
  if (!mine.length) return "–";
  const others = mine.filter(([, sender]) => sender !== node);
  return `${many(sum(mine) - sum(others), "local group")}${told.nodes.length > 1 ? `, ${count(sum(others))} from others` : ""}`;
}

/** The nodes and how they run: one line while all is well. */
function nodesSection(told) {
  const nodes = told.nodes || [];
  if (!nodes.length) return null;
  const hub = isHub(told), listed = told.state !== "ended"; // the records of a run do not have the directory's entries
  const head = ["node", "does", "step", "trained on", ...(listed ? ["model", "tasks"] : []), ...(listed && hub ? ["directory entry"] : [])];
  const lines = nodes.map((node) => stacked(head,
    el("th", { scope: "row" }, el("a", { href: route("node", node.node) }, name(node.node))),
    does(node, isUnsure(told)),
    el("td", { text: ["lost", "unread"].includes(node.kind) ? "–" : node.kind === "elsewhere" ? `version ${count(node.version)}` : count(node.step) }), el("td", { text: trainedOnBy(told, node.node) }),
    ...(listed ? [el("td", { class: "words" }, name(node.model || "–")), el("td", { class: "words" }, name(node.tasks.slice(0, 4).join(", ") || "–"), node.tasks.length + node.tasks_left_out > 4 ? ` and ${node.tasks.length + node.tasks_left_out - 4} more` : null)] : []),
    ...(listed && hub ? [el("td", { class: "words" }, standing(node.entry, node.problem), node.heard_s === null ? null : el("small", { text: isOver(told) ? `, ${timeOf(told.at - node.heard_s)}` : `, ${ago(node.heard_s)} ago` }))] : [])));
  const bad = Boolean(ALARMS[told.state] || troubleOf(told)), here = nodes.filter(({ kind }) => kind !== "elsewhere"), away = here.reduce((sum, node) => sum + (node.away || []).length, 0);
  const answering = isDone(told) || isUnsure(told) ? "" : `${4 * here.length - away} of ${many(4 * here.length, "process answers", "processes answer")}. `;
  const sum = bad ? "Something is wrong. " : isDone(told) ? `${STATES[told.state][1]}. ` : told.state === "starting" ? "Starting. " : "All is well. ";
  const fold = el("details", { class: "fold", id: "fold", open: chosen.fold ?? bad }, el("summary", { onclick: ({ currentTarget }) => { chosen.fold = !currentTarget.parentElement.open; } }, el("b", { class: bad ? "warn" : "", text: sum }), answering, el("span", { class: "soft", text: `${many(nodes.length + told.nodes_left_out, "node")} and how ${nodes.length + told.nodes_left_out === 1 ? "it runs" : "they run"}` })),
    scrolled("Table of nodes", el("table", { class: "stacks" }, el("caption", { text: `${many(nodes.length + told.nodes_left_out, "node")} known here` }), el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col", text })))), el("tbody", {}, ...lines))),
    leftOut(told.nodes_left_out, "node"), told.earlier?.length ? el("p", { class: "hint", text: `Not shown, as earlier runs left them on this server: ${told.earlier.slice(0, 8).join(", ")}${told.earlier.length > 8 ? ` and ${told.earlier.length - 8} more` : ""}.` }) : null, leftOut(told.unreadable, "unreadable entry in the directory", "unreadable entries in the directory"),
    el("p", { class: "facts" }, told.server ? el("span", {}, "server ", name(told.server)) : null, told.swarm ? el("span", {}, "swarm ", name(told.swarm)) : null, el("span", {}, ...worded("`swarm top` shows the same in a terminal"))));
  return el("section", { id: "nodes", "aria-label": "Nodes" }, fold);
}

function textsSection(told) {
  const groups = told.groups || [];
  if (!groups.length) return section("texts", "Newest training answers", el("p", { class: "hint", text: told.state === "ended" ? "No batch is on record (batches.jsonl)." : "Questions and answers appear here with the first batch." }));
  const datasets = [...new Set(groups.map(({ dataset }) => dataset))].sort();
  if (chosen.texts && !datasets.includes(chosen.texts)) chosen.texts = "";
  const wanted = groups.filter(({ dataset }) => !chosen.texts || dataset === chosen.texts).slice(0, 12);
  const hold = el("button", { type: "button", id: "hold", "aria-pressed": String(chosen.held), text: "Hold the list", onclick: () => { chosen.held = !chosen.held; byId("hold").setAttribute("aria-pressed", String(chosen.held)); } });
  return section("texts", "Newest training answers", el("p", { class: "tools" }, el("label", { for: "texts-of", text: "Dataset " }), select("texts-of", [["", "all"], ...datasets.map((each) => [each, each])], chosen.texts, (value) => (chosen.texts = value)), " ", hold), el("ul", { class: "cards" }, ...wanted.map((group) => groupLine(group, told, isOver(told)))));
}

/** What a node does; while the server is lost or stores nothing (unsure), what it did when it was seen last. */
function does(node, unsure) {
  const wrong = node.kind === "silent" || node.kind === "lost", last = unsure && !wrong, look = wrong ? "bad" : node.trouble || unsure ? "warn" : "";
  const kind = node.trouble ? "△ " : last ? node.kind : KINDS[node.kind];
  const words = node.trouble ? name(node.words) : node.words && node.words !== node.kind ? el("small", {}, ": ", name(node.words.replace(`${node.kind}: `, ""))) : null;
  return el("td", { class: `words ${look}` }, last ? "? seen last: " : "", kind, words);
}

/** Whether the run takes no more steps. */
const isDone = ({ state }) => ["ended", "finished", "stopped"].includes(state);

/** Whether what is shown was seen last and stays as it is. */
const isOver = ({ state }) => state === "ended" || state === "lost";

/** Whether the server answers and stores nothing, or no longer has what it stored. */
const isFaulty = ({ state }) => state === "unstored" || state === "emptied";

/** Whether the server is lost or stores nothing: how the nodes are is not known, so nothing may look as if all were well. */
const isUnsure = (told) => told.state === "lost" || isFaulty(told);

const leftOut = (number, one, more) => (number ? el("p", { class: "hint", text: `${many(number, one, more)} not shown.` }) : null);

function select(id, options, value, change, more = {}) {
  const node = el("select", { id, ...more, onchange: (event) => { change(event.target.value); again(); } }, ...options.map(([key, text]) => el("option", { value: key, text })));
  node.value = value;
  return node;
}

async function showNode(node) {
  const state = await get("swarm.json");
  const row = (state.leaderboard || []).find((each) => each.node === node);
  const told = await get("node.json", { node });
  document.title = `${node} · swarm`;
  const curves = Object.entries(told.curves).map(([dataset, points]) => ({ title: dataset || "all tasks", points }));
  const held = new Set(told.steps.filter((each) => each[4]).map(([step]) => step));
  const several = Object.entries(told.parts).map(([title, points]) => ({ title, points }));
  const rewards = [["local groups", 2], ["foreign groups", 3]].map(([title, column]) => ({ title, link: (step) => (held.has(step) ? route("step", node, step) : null), points: told.steps.filter((each) => each[column] !== null).map((each) => [each[0], each[column]]) })).filter(({ points }) => points.length);
  return [
    trail([node]),
    el("h1", {}, name(node)),
    row ? el("p", { class: "facts" }, standing(row.standing), el("span", { text: `held-out set ${row.set || "of unknown id"}, ${many(row.n, "task")}${scoredBy(row)}` }), row.unknown ? el("span", { text: ofAnswers(row) }) : null, row.key ? el("span", { class: "key", text: `key ${row.key}` }) : null) : null,
    section("curves", row?.by_reward ? "Held-out mean reward by task" : "Held-out pass rate by task", row?.by_reward ? el("p", { class: "hint", text: `Mean reward: ${NO_PASS} in [[tasks]] for a pass rate.` }) : null, curves.length ? chart(`Held-out ${row?.by_reward ? "mean reward" : "pass rate"} of ${node} by policy version`, curves, "version") : el("p", { class: "hint", text: "No held-out score of this node was received yet." }), curves.length ? curveTable(curves) : null),
    section("steps", "Reward by step", rewards.length ? chart(`Mean reward of the groups in each batch of ${node}; points with a dot link to their groups`, rewards, "step") : el("p", { class: "hint", text: "Its batches are not on this server, or there are none yet." }), rewards.length && told.steps[0][0] > 1 ? el("p", { class: "hint", text: earlier(told.steps[0][0]) }) : null, stepForm(node)),
    several.length > 1 ? section("rewards", "Each reward by step", chart(`Mean of each reward over the answers of ${node}`, several, "step")) : null,
    told.lengths.length > 1 ? section("lengths", "Answer length by step", chart(`Mean tokens of the answers of ${node}`, [{ title: "tokens", points: told.lengths.map(([step, tokens]) => [step, tokens]) }], "step"), chart(`Share of the answers of ${node} that were cut off`, [{ title: "share cut off", points: told.lengths.map(([step, , share]) => [step, share]) }], "step")) : null,
    section("texts", "Texts", told.groups.length ? el("ul", { class: "cards" }, ...told.groups.slice(0, 24).map((group) => groupLine(group, state))) : el("p", { class: "hint", text: "No group was read yet." })),
  ];
}

/** Why the rewards begin at a later step. */
const earlier = (first) => `Steps before ${first} are not shown: the page keeps a node's newest 300 steps, and of a node whose trainer's records are not on this machine only those whose batches it has read.`;

function curveTable(curves) {
  const head = ["task", "first", "newest", "evaluations"];
  return el("details", {}, el("summary", { text: "As a table" }), scrolled("Table of held-out scores by task", el("table", {}, el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col", text })))), el("tbody", {}, ...curves.map(({ title, points }) => el("tr", {}, el("th", { scope: "row" }, name(title)), el("td", { text: `${ratio(points[0][1])} at version ${points[0][0]}` }), el("td", { text: `${ratio(points.at(-1)[1])} at version ${points.at(-1)[0]}` }), el("td", { text: String(points.length) })))))));
}

const stepForm = (node) => {
  const input = el("input", { id: "step", type: "number", min: "1", inputmode: "numeric" });
  return el("form", { class: "tools", onsubmit: (event) => { event.preventDefault(); if (input.value) location.hash = route("step", node, Number(input.value)); } }, el("label", { for: "step", text: "Groups of step " }), input, " ", el("button", { text: "Show" }));
};

async function showSwarm() {
  const told = await get("swarm.json"), quiet = told.state === "waiting" || told.state === "empty";
  byId("home").textContent = told.run ? `Run ${told.run}` : "This run";
  byId("heard").textContent = quiet ? "looks every 5 s" : told.state === "ended" && told.ended ? `ended ${ago(told.now - told.ended.at)} ago` : `seen ${ago(told.now - told.at)} ago`;
  if (quiet) {
    document.title = `${STATES[told.state][1]} · swarm`;
    return [nothingYet(told)];
  }
  const seen = focus(told, chosen.node), mine = seen.name ? await get("node.json", { node: seen.name }).catch((problem) => { if (problem instanceof NotFound) return null; throw problem; }) : null;
  document.title = `${answer(told, seen)[0]} · swarm`;
  return [banner(told), answerSection(told, seen, mine), homeSection(told), saysSection(told, seen, mine?.answers), setsSection(seen, mine), tasksSection(seen, mine), exchangeSection(told), leaderboardSection(told), textsSection(told), nodesSection(told)];
}

function view() {
  const [what, ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  if (what === "node") return { build: () => showNode(rest[0] || "") };
  if (what === "step") return { build: () => showStep(rest[0] || "", Number(rest[1]) || 0) };
  if (what === "group") return { build: () => showGroup(rest[0] || "", Number(rest[1]) || 0, Number(rest[2]) || 0) };
  return { build: showSwarm, live: true };
}

/** Put the parts on the page. An unchanged section is not touched, so that its focus, its selected text and its scroll position stay; a changed one keeps the focus if it can. */
function place(parts, live) {
  const main = byId("main"), wanted = parts.filter(Boolean);
  if (!live) return main.replaceChildren(...wanted);
  const old = new Map([...main.children].map((child) => [child.id || child.className.split(" ")[0], child]));
  const focus = document.activeElement, focused = main.contains(focus) && (focus.id ? `#${CSS.escape(focus.id)}` : focus.getAttribute("href") ? `[href="${CSS.escape(focus.getAttribute("href"))}"]` : null);
  const next = wanted.map((part) => {
    const before = old.get(part.id || part.className.split(" ")[0]);
    part.querySelectorAll("details:not(#fold)").forEach((each, index) => { const last = each.id ? byId(each.id) : !changed && before?.querySelectorAll("details")[index]; if (last) each.open = last.open; });
    if (before && (before.isEqualNode(part) || (part.id === "texts" && chosen.held && !changed))) return before;
    part.querySelectorAll(".scroll").forEach((each, index) => { const last = before?.querySelectorAll(".scroll")[index]; if (last) each.dataset.left = last.scrollLeft; });
    return part;
  });
  [...main.children].filter((child) => !next.includes(child)).forEach((child) => child.remove());
  next.forEach((part, index) => { if (main.children[index] !== part) main.insertBefore(part, main.children[index] || null); });
  main.querySelectorAll(".scroll[data-left]").forEach((each) => { each.scrollLeft = Number(each.dataset.left); delete each.dataset.left; });
  if (focused && document.activeElement !== focus) main.querySelector(focused)?.focus({ preventScroll: true });
}

/** Resolves when the pointer is not pressed, and after HELD_MS at the latest: a link that is replaced between press and release is not followed. */
let release = null;
const unpressed = () => release && Promise.race([release.promise, new Promise((resolve) => setTimeout(resolve, HELD_MS))]);
addEventListener("pointerdown", ({ button }) => { if (button === 0 && !release) { release = {}; release.promise = new Promise((resolve) => { release.now = resolve; }); } }, true);
// The click follows pointerup, so it goes first.
for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => setTimeout(() => { release?.now(); release = null; }), true);

let changed = false;
const again = () => { changed = true; show(); };

async function show() {
  clearTimeout(timer);
  const mine = ++round, here = location.hash || "#/", { build, live } = view();
  byId("home")[live ? "setAttribute" : "removeAttribute"]("aria-current", "page");
  let parts;
  try {
    parts = await build();
  } catch (problem) {
    const gone = problem instanceof NoAnswer, title = gone ? "The dashboard does not answer" : problem instanceof NotFound ? "Not found" : "This page has an error";
    if (title === "This page has an error") console.error(problem);
    document.title = `${title} · swarm`;
    parts = [el("div", { class: "banner bad", id: "problem" }, el("h1", { text: `! ${title}` }), el("p", {}, gone ? "It was ended, or this machine was asleep. The page keeps trying." : el("bdi", {}, ...worded(String(problem.message)))), el("p", {}, el("a", { href: "#/", text: "To the swarm" })))];
    if (live && byId("main").querySelector("section")) parts = [...parts, ...[...byId("main").children].filter((child) => child.tagName === "SECTION")];
  }
  if (live && here === shown) await unpressed();
  if (mine !== round) return;
  place(parts, live && here === shown);
  changed = false;
  if (here !== shown && shown !== "") { byId("main").focus({ preventScroll: true }); scrollTo(0, 0); }
  shown = here;
  document.documentElement.dataset.ready = String(mine);
  if (live) timer = setTimeout(function next() { document.hidden ? (timer = setTimeout(next, 1000)) : show(); }, REFRESH_MS);
}

byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });
addEventListener("hashchange", show);
let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => view().live && again(), 200); });
document.addEventListener("visibilitychange", () => document.hidden || show());
show();
