// A small part of Markdown, as elements: fenced code, headings, lists, `code` and **bold**. No markup is ever parsed, so
// that an answer can hold any.

import { element } from "./dom.js";

const FENCE = /^\s*```(.*)$/;
const HEADING = /^#{1,6}\s+(.*)$/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*)/;

/** Show `text` in `place`. Blocks that did not change stay as they are: a reader may have selected something in them. */
export function render(place, text) {
  const blocks = blocksOf(text.split("\n"));
  blocks.forEach((block, index) => {
    const shown = place.children[index];
    const source = JSON.stringify(block);
    if (shown?.source === source) return;
    const made = BUILD[block.kind](block);
    made.source = source;
    if (shown) shown.replaceWith(made);
    else place.append(made);
  });
  while (place.children.length > blocks.length) place.lastElementChild.remove();
}

function blocksOf(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) at += 1;
    else
      at =
        fence(lines, at, blocks) || heading(lines, at, blocks) || list(lines, at, blocks) || prose(lines, at, blocks);
  }
  return blocks;
}

// Each reads one block from line `at` and returns the line behind it; 0 if there is none of its kind.

function fence(lines, at, blocks) {
  if (!FENCE.test(lines[at])) return 0;
  let end = at + 1;
  while (end < lines.length && !/^\s*```\s*$/.test(lines[end])) end += 1;
  blocks.push({ kind: "code", text: lines.slice(at + 1, end).join("\n") });
  return end + 1;
}

function heading(lines, at, blocks) {
  const found = HEADING.exec(lines[at]);
  if (found) blocks.push({ kind: "heading", text: found[1] });
  return found ? at + 1 : 0;
}

function list(lines, at, blocks) {
  const first = ITEM.exec(lines[at]);
  if (!first) return 0;
  const items = [];
  let end = at;
  for (let found; end < lines.length && (found = ITEM.exec(lines[end])); end += 1) items.push(found[2]);
  blocks.push({ kind: "list", start: first[1] ?? null, items });
  return end;
}

function prose(lines, at, blocks) {
  let end = at + 1;
  const goesOn = (line) => line.trim() && !FENCE.test(line) && !HEADING.test(line) && !ITEM.test(line);
  while (end < lines.length && goesOn(lines[end])) end += 1;
  blocks.push({ kind: "prose", text: lines.slice(at, end).join("\n") });
  return end;
}

const BUILD = {
  code: ({ text }) => element("pre", { tabindex: "0" }, element("code", {}, text)),
  heading: ({ text }) => element("p", { class: "heading" }, ...inline(text)),
  list: ({ start, items }) =>
    element(start ? "ol" : "ul", { start }, ...items.map((item) => element("li", {}, ...inline(item)))),
  prose: ({ text }) => element("p", {}, ...inline(text)),
};

function inline(text) {
  return text.split(INLINE).map((piece) => {
    if (/^`.+`$/.test(piece)) return element("code", {}, piece.slice(1, -1));
    if (/^\*\*.+\*\*$/.test(piece)) return element("strong", {}, piece.slice(2, -2));
    return piece;
  });
}
