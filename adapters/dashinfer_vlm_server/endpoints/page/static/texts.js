// The page's texts in several languages. Code and index.html contain the English ones, by which texts.json has the
// others.

const CHOICE = "dashinfer-vlm-language";
const ATTRIBUTES = ["aria-label", "placeholder"];

const { languages, texts } = await loadTable();
const originals = [...englishTexts(), ...englishAttributes()];
let language = localStorage.getItem(CHOICE) ?? browserLanguage();

/** Without the table, the page is in English. */
async function loadTable() {
  try {
    return await (await fetch("page/texts.json")).json();
  } catch {
    return { languages: { en: "English" }, texts: {} };
  }
}

function browserLanguage() {
  const wanted = navigator.languages.map((tag) => tag.split("-")[0]);
  return wanted.find((code) => code in languages) ?? "en";
}

/** A text in the user's language; `{name}` in it is replaced by a value. */
export function text(english, values = {}) {
  return translated(english).replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

/** A count in the user's language: `1 image`, `2 images`. */
export const counted = (count, noun) =>
  text(`{count} ${noun}${count === 1 ? "" : "s"}`, { count: count.toLocaleString(language) });

/** A date and time in the user's language. */
export const dated = (milliseconds) =>
  new Date(milliseconds).toLocaleString(language, { dateStyle: "medium", timeStyle: "short" });

/** A number in the user's language, with this many decimals. */
export const decimal = (value, digits = 0) =>
  value.toLocaleString(language, { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** Set up the menu of languages; `onchange` is called after a change. */
export function openLanguages(menu, onchange) {
  for (const [code, name] of Object.entries(languages)) menu.append(new Option(name, code, false, code === language));
  menu.addEventListener("change", () => {
    language = menu.value;
    localStorage.setItem(CHOICE, language);
    translatePage();
    onchange();
  });
  translatePage();
}

function translated(english) {
  if (language === "en") return english;
  const known = texts[english]?.[language];
  if (known === undefined) console.warn(`texts.json has no ${language} text for: ${english}`);
  return known ?? english;
}

function translatePage() {
  document.documentElement.lang = language === "zh" ? "zh-Hans" : language;
  for (const { english, set } of originals) set(translated(english));
}

function englishTexts() {
  const found = [];
  const nodes = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (nodes.nextNode()) {
    const node = nodes.currentNode;
    const [, before, english, after] = /^(\s*)(.*?)(\s*)$/s.exec(node.data);
    if (!english || node.parentElement.closest("[translate=no], noscript")) continue;
    found.push({ english: english.replace(/\s+/g, " "), set: (shown) => (node.data = before + shown + after) });
  }
  return found;
}

function englishAttributes() {
  return ATTRIBUTES.flatMap((name) =>
    [...document.querySelectorAll(`[${name}]:not([translate=no])`)].map((node) => ({
      english: node.getAttribute(name),
      set: (shown) => node.setAttribute(name, shown),
    })),
  );
}
