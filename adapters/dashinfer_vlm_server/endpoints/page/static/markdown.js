// Renders a subset of Markdown as elements: fenced code, headings, lists, `code` and **bold**. HTML in a response is
// displayed as text.

import { element } from "./dom.js";

const FENCE = /^\s*```(.*)$/;
const HEADING = /^#{1,6}\s+(.*)$/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*)/;

/** Render `text` in `container`. Unchanged blocks are kept, because the user may have selected text in them. */
export function render(container, text) {
  const blocks = blocksOf(text.split("\n"));
  blocks.forEach((block, index) => {
    const existing = container.children[index];
    const source = JSON.stringify(block);
    if (existing?.source === source) return;
    const node = BUILD[block.kind](block);
    node.source = source;
    if (existing) existing.replaceWith(node);
    else container.append(node);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}

function blocksOf(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) at += 1;
    else
      at =
        fence(lines, at, blocks) ||
        heading(lines, at, blocks) ||
        list(lines, at, blocks) ||
        paragraph(lines, at, blocks);
  }
  return blocks;
}

// Each function parses a block from line `at` and returns the line after it, or 0 if the block is of another kind.

function fence(lines, at, blocks) {
  if (!FENCE.test(lines[at])) return 0;
  let end = at + 1;
  while (end < lines.length && !/^\s*```\s*$/.test(lines[end])) end += 1;
  blocks.push({ kind: "code", text: lines.slice(at + 1, end).join("\n") });
  return end + 1;
}

function heading(lines, at, blocks) {
  const match = HEADING.exec(lines[at]);
  if (match) blocks.push({ kind: "heading", text: match[1] });
  return match ? at + 1 : 0;
}

function list(lines, at, blocks) {
  const first = ITEM.exec(lines[at]);
  if (!first) return 0;
  const items = [];
  let end = at;
  for (let match; end < lines.length && (match = ITEM.exec(lines[end])); end += 1) items.push(match[2]);
  blocks.push({ kind: "list", start: first[1] ?? null, items });
  return end;
}

function paragraph(lines, at, blocks) {
  let end = at + 1;
  const continues = (line) => line.trim() && !FENCE.test(line) && !HEADING.test(line) && !ITEM.test(line);
  while (end < lines.length && continues(lines[end])) end += 1;
  blocks.push({ kind: "paragraph", text: lines.slice(at, end).join("\n") });
  return end;
}

const BUILD = {
  code: ({ text }) => element("pre", { tabindex: "0" }, element("code", {}, text)),
  heading: ({ text }) => element("p", { class: "heading" }, ...inline(text)),
  list: ({ start, items }) =>
    element(start ? "ol" : "ul", { start }, ...items.map((item) => element("li", {}, ...inline(item)))),
  paragraph: ({ text }) => element("p", {}, ...inline(text)),
};

function inline(text) {
  return text.split(INLINE).map((part) => {
    if (/^`.+`$/.test(part)) return element("code", {}, part.slice(1, -1));
    if (/^\*\*.+\*\*$/.test(part)) return element("strong", {}, part.slice(2, -2));
    return part;
  });
}
