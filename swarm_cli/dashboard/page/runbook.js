// An alert's runbook as a page: headings, lists, tables and paragraphs of its Markdown.
"use strict";

async function showRunbook(title) {
  const { name: page, text } = await get("runbook.json", { name: title });
  document.title = `${page} · swarm`;
  return [trail(["runbook"]), ...blocks(text).map(block)];
}

/** The text's blocks, as lists of lines; a list's item is a block that begins with its mark. */
function blocks(text) {
  const found = [[]];
  for (const line of text.split("\n")) {
    const last = found.at(-1), begins = /^(#|- |\d+\. )/.test(line);
    if (!line.trim()) found.push([]);
    else if (begins && last.length) found.push([line]);
    else last.push(line);
  }
  return joined(found.filter((lines) => lines.length));
}

/** Neighbouring items of a list as one block: [mark, item, item, ...]. */
function joined(found) {
  const whole = [];
  for (const lines of found) {
    const mark = /^(- |\d+\. )/.exec(lines[0])?.[1];
    const kind = mark ? (mark === "- " ? "ul" : "ol") : lines[0].startsWith("|") ? "table" : lines[0].startsWith("#") ? "heading" : "p";
    const words = lines.map((line) => line.trim()).join(" ");
    if (mark && whole.at(-1)?.kind === kind) whole.at(-1).items.push(words.slice(mark.length));
    else whole.push({ kind, lines, items: mark ? [words.slice(mark.length)] : [words] });
  }
  return whole;
}

function block({ kind, lines, items }) {
  if (kind === "heading") return el(items[0].startsWith("##") ? "h2" : "h1", {}, ...inline(items[0].replace(/^#+ /, "")));
  if (kind === "p") return el("p", {}, ...inline(items[0]));
  if (kind !== "table") return el(kind, {}, ...items.map((item) => el("li", {}, ...inline(item))));
  const [head, , ...rows] = lines.map((line) => line.replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim()));
  const titles = head.map((cell) => cell || "…");
  return scrolled("Table", el("table", { class: "stacks runbook" }, el("thead", {}, el("tr", {}, ...titles.map((cell) => el("th", { scope: "col" }, ...inline(cell))))), el("tbody", {}, ...rows.map((row) => stacked(titles, ...row.map((cell) => el("td", { class: "words" }, ...inline(cell))))))));
}

/** Code, emphasis and links. A link to another runbook stays on this page; others name their file, because it is not served. */
function inline(text) {
  const parts = [];
  let from = 0;
  for (const found of text.matchAll(/`([^`]+)`|\*+([^*]+)\*+|\[([^\]]+)\]\(([^)]+)\)/g)) {
    const [all, code, strong, words, target] = found, runbook = /^(\w+)\.md$/.exec(target || "");
    parts.push(text.slice(from, found.index));
    from = found.index + all.length;
    if (code) parts.push(el("code", { text: code }));
    else if (strong) parts.push(el("em", { text: strong }));
    else if (runbook && runbook[1] !== "README") parts.push(el("a", { href: route("runbook", runbook[1]), text: words }));
    else if (/^https?:/.test(target)) parts.push(el("a", { href: target, target: "_blank", rel: "noreferrer", text: words }));
    else parts.push(words, el("small", { text: ` (${target.replace(/^(\.\.\/)+/, "docs/")})` }));
  }
  return [...parts, text.slice(from)];
}
