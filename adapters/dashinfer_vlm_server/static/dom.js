// Elements without markup: whatever the model or a user wrote goes in as text.

/** An element with properties (`class`, `on<event>`, attributes) and children; empty children are left out. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

export const byId = (id) => document.getElementById(id);

export const button = (text, onclick, properties = {}) =>
  element("button", { type: "button", onclick, ...properties }, text);

/** `1 picture`, `2 pictures`. */
export const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** Say something to screen readers, once. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Dialogs close by each button in them that is marked so, by Escape, and by a click beside them. */
export function closable(dialog) {
  for (const closer of dialog.querySelectorAll("[data-close]")) closer.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
}
