// Pictures and videos of a question: where they come from, and what the model sees of them.

import { Failure, preview } from "./api.js";
import { button, byId, closable, counted, element } from "./dom.js";

const VIDEO = /\.(mp4|m4v|mov|mkv|webm|avi|ts)$/i;
const names = new Set();

/** One picture or video. Tells by the event `change` when the server has said what the model sees of it. */
export class Attachment extends EventTarget {
  constructor({ kind, name, url, file = null }) {
    super();
    Object.assign(this, { kind, name, url, file });
    this.local = file && URL.createObjectURL(file);
    this.seen = null;
    this.fault = "";
    this.looking = this.look();
  }

  /** From a file; null if it is neither a picture nor a video. */
  static async fromFile(file) {
    const kind = file.type.split("/")[0];
    if (kind !== "image" && kind !== "video") return null;
    return new Attachment({
      kind,
      name: unique(file.name || `pasted.${file.type.split("/")[1]}`),
      url: await dataUrl(file),
      file,
    });
  }

  static fromUrl(url, kind = VIDEO.test(new URL(url).pathname) ? "video" : "image") {
    return new Attachment({ kind, name: new URL(url).pathname.split("/").pop() || new URL(url).host, url });
  }

  /** The part of a message that holds it; `url` stands in for its own. */
  part(url = this.url) {
    const type = `${this.kind}_url`;
    return { type, [type]: { url } };
  }

  /** Ask what the model sees. */
  async look() {
    this.fault = "";
    this.#changed();
    try {
      const answer = await preview([{ role: "user", content: [this.part()] }]);
      this.seen = answer && answer.data[0];
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      this.fault = error.message;
    }
    this.#changed();
  }

  get tokens() {
    return this.seen?.tokens ?? 0;
  }

  /** What to show of it at small size; none for a video that was not looked at. */
  get thumbnail() {
    return this.seen?.frames[0]?.url ?? (this.kind === "image" ? this.local : null);
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

/** A list item that shows an attachment, and stays true; with `onremove` it can be taken away. */
export function tile(attachment, onremove = null) {
  const place = element("li", { class: "tile" });
  const draw = () => {
    place.classList.toggle("faulty", attachment.fault !== "");
    place.setAttribute("aria-busy", String(!attachment.seen && !attachment.fault));
    const focused = place.contains(document.activeElement) && document.activeElement.className;
    place.replaceChildren(
      element(
        "button",
        { type: "button", class: "look", onclick: () => (attachment.fault ? attachment.look() : show(attachment)) },
        attachment.thumbnail
          ? element("img", { src: attachment.thumbnail, alt: "" })
          : element("span", { class: "no-picture", "aria-hidden": "true" }, attachment.kind),
        element(
          "span",
          { class: "hidden" },
          attachment.fault ? `Look again at ${attachment.name}` : `What the model sees of ${attachment.name}`,
        ),
      ),
      element("span", { class: "tile-name", title: attachment.name }, attachment.name),
      element("span", { class: "tile-cost" }, cost(attachment)),
      ...(onremove ? [button("×", onremove, { class: "remove", "aria-label": `Remove ${attachment.name}` })] : []),
    );
    if (focused) place.querySelector(`.${focused}`)?.focus();
  };
  attachment.addEventListener("change", draw);
  draw();
  return place;
}

function cost(attachment) {
  if (attachment.fault) return attachment.fault;
  if (!attachment.seen) return "looking…";
  const { tokens, size, kind, frame_count: frames } = attachment.seen;
  return `${counted(tokens, "token")} · ${size.join("×")}${kind === "video" ? ` · ${counted(frames, "frame")}` : ""}`;
}

/** The dialog with the frames that the model sees. */
export function openFrames() {
  closable(byId("frames-dialog"));
  byId("frames-grid").addEventListener("change", () =>
    byId("frames").classList.toggle("plain", !byId("frames-grid").checked),
  );
}

function show({ name, seen }) {
  if (!seen) return;
  byId("frames-title").textContent = `What the model sees of ${name}`;
  byId("frames-facts").textContent = facts(seen);
  byId("frames").replaceChildren(...seen.frames.map((frame) => frameOf(frame, seen)));
  byId("frames-dialog").showModal();
}

function facts({ kind, source_size: source, size, cells: [time, rows, columns], tokens, frame_count: count, frames }) {
  const resized = source ? `${source.join("×")} pixels become ${size.join("×")}` : `${size.join("×")} pixels`;
  const cells = `${time > 1 ? `${time} × ` : ""}${rows} × ${columns} cells`;
  const some = frames.length < count ? `; ${frames.length} of ${count} frames are shown` : "";
  const shared = kind === "video" ? `; ${count / time} frames share theirs` : "";
  return `${resized}: ${cells}, ${counted(tokens, "token")}${shared}${some}.`;
}

function frameOf({ index, url }, { kind, size: [width, height], cells: [, rows, columns] }) {
  const picture = element(
    "span",
    { class: "cells" },
    element("img", { src: url, width, height, alt: kind === "video" ? `Frame ${index + 1}` : "The picture" }),
  );
  picture.style.setProperty("--columns", columns);
  picture.style.setProperty("--rows", rows);
  return element("figure", {}, picture, kind === "video" ? element("figcaption", {}, `Frame ${index + 1}`) : null);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** Code names files, so that each needs a name of its own. */
function unique(name) {
  const [, stem, ending] = /^(.*?)(\.[^.]*)?$/.exec(name);
  let free = name;
  for (let number = 2; names.has(free); number += 1) free = `${stem}-${number}${ending ?? ""}`;
  names.add(free);
  return free;
}
