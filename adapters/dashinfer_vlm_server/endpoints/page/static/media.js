// Images and videos of a prompt, and their previews as the model sees them.

import { ApiError, preview as fetchPreview } from "./api.js";
import { button, byId, closable, counted, element } from "./dom.js";

const VIDEO = /\.(mp4|m4v|mov|mkv|webm|avi|ts)$/i;
const names = new Set();

/** An image or a video. Dispatches `change` when its preview or error changes. */
export class Attachment extends EventTarget {
  constructor({ kind, name, url, file = null }) {
    super();
    Object.assign(this, { kind, name: printable(name), url, file });
    this.local = file && URL.createObjectURL(file);
    this.preview = null;
    this.error = "";
    this.loadPreview();
  }

  /** Create an attachment from a file; null if it is not an image or a video. */
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

  /** What is stored of an attachment: a file is stored with its content. */
  record() {
    return { kind: this.kind, name: this.name, url: this.url, type: this.file && this.file.type };
  }

  static fromRecord({ kind, name, url, type }) {
    names.add(printable(name));
    return new Attachment({ kind, name, url, file: type && fileFromDataUrl(url, name, type) });
  }

  /** The content part of a message; `url` replaces its own URL. */
  part(url = this.url) {
    const type = `${this.kind}_url`;
    return { type, [type]: { url } };
  }

  /** Request the preview from the server. */
  async loadPreview() {
    this.error = "";
    this.#changed();
    try {
      const result = await fetchPreview([{ role: "user", content: [this.part()] }]);
      this.preview = result && result.data[0];
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.error = error.message;
    }
    this.#changed();
  }

  get tokens() {
    return this.preview?.tokens ?? 0;
  }

  /** URL of a thumbnail; null for a video without a preview. */
  get thumbnail() {
    return this.preview?.frames[0]?.url ?? (this.kind === "image" ? this.local : null);
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

/** A list item that shows an attachment and follows its changes; with `onremove`, it has a Remove button. */
export function tile(attachment, onremove = null) {
  const item = element("li", { class: "tile" });
  const draw = () => {
    item.classList.toggle("failed", attachment.error !== "");
    item.setAttribute("aria-busy", String(!attachment.preview && !attachment.error));
    const focused = item.contains(document.activeElement) && document.activeElement.className;
    item.replaceChildren(
      element(
        "button",
        {
          type: "button",
          class: "preview",
          onclick: () => (attachment.error ? attachment.loadPreview() : showFrames(attachment)),
        },
        attachment.thumbnail
          ? element("img", { src: attachment.thumbnail, alt: "" })
          : element("span", { class: "no-image", "aria-hidden": "true" }, attachment.kind),
        element(
          "span",
          { class: "hidden" },
          attachment.error ? `Retry the preview of ${attachment.name}` : `Preview of ${attachment.name}`,
        ),
      ),
      element("span", { class: "tile-name", title: attachment.name }, attachment.name),
      element("span", { class: "tile-cost" }, cost(attachment)),
      ...(onremove ? [button("×", onremove, { class: "remove", "aria-label": `Remove ${attachment.name}` })] : []),
    );
    if (focused) item.querySelector(`.${focused}`)?.focus();
  };
  attachment.addEventListener("change", draw);
  draw();
  return item;
}

function cost(attachment) {
  if (attachment.error) return attachment.error;
  if (!attachment.preview) return "loading…";
  const { tokens, size, kind, frame_count: frames } = attachment.preview;
  return `${counted(tokens, "token")} · ${size.join("×")}${kind === "video" ? ` · ${counted(frames, "frame")}` : ""}`;
}

/** The dialog with the frames that the model sees. */
export function openFrames() {
  closable(byId("frames-dialog"));
  byId("frames-grid").addEventListener("change", () =>
    byId("frames").classList.toggle("plain", !byId("frames-grid").checked),
  );
}

function showFrames({ name, preview }) {
  if (!preview) return;
  byId("frames-title").textContent = `${name} as the model sees it`;
  byId("frames-facts").textContent = describe(preview);
  byId("frames").replaceChildren(...preview.frames.map((frame) => figure(frame, preview)));
  byId("frames-dialog").showModal();
}

function describe({ kind, source_size, size, cells: [time, rows, columns], tokens, frame_count: count, frames }) {
  const [original, pixels] = [source_size ?? size, size].map((sides) => sides.join("×"));
  const resized = `${original} pixels${original === pixels ? "" : `, resized to ${pixels}`}`;
  const cells = `${time > 1 ? `${time} × ` : ""}${columns} × ${rows} cells`;
  const shown = frames.length < count ? `; ${frames.length} of ${count} frames are shown` : "";
  const shared = kind === "video" ? `; ${count / time} frames share each token` : "";
  return `${resized}: ${cells}, ${counted(tokens, "token")}${shared}${shown}.`;
}

function figure({ index, url }, { kind, size: [width, height], cells: [, rows, columns] }) {
  const image = element(
    "span",
    { class: "cells" },
    element("img", { src: url, width, height, alt: kind === "video" ? `Frame ${index + 1}` : "The image" }),
  );
  image.style.setProperty("--columns", columns);
  image.style.setProperty("--rows", rows);
  return element("figure", {}, image, kind === "video" ? element("figcaption", {}, `Frame ${index + 1}`) : null);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function fileFromDataUrl(url, name, type) {
  const bytes = Uint8Array.from(atob(url.slice(url.indexOf(",") + 1)), (character) => character.charCodeAt(0));
  return new File([bytes], name, { type });
}

/** A file name without control characters: in generated code, a line break would end the text that contains it. */
const printable = (name) => name.replace(/\p{Cc}/gu, "_");

/** Make a file name unique, because generated code refers to files by name. */
function unique(original) {
  const name = printable(original);
  const [, stem, ending] = /^(.*?)(\.[^.]*)?$/.exec(name);
  let candidate = name;
  for (let number = 2; names.has(candidate); number += 1) candidate = `${stem}-${number}${ending ?? ""}`;
  names.add(candidate);
  return candidate;
}
