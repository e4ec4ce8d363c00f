// Creates elements without parsing markup: model output and user input are inserted as text.

/** Create an element with properties (`class`, `on<event>`, attributes) and children; empty children are omitted. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

export const byId = (id) => document.getElementById(id);

export const button = (text, onclick, properties = {}) =>
  element("button", { type: "button", onclick, ...properties }, text);

/** Announce text to screen readers. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Let a dialog be closed by its `data-close` buttons, by Escape, and by a click outside. */
export function closable(dialog) {
  for (const closer of dialog.querySelectorAll("[data-close]")) closer.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
}
