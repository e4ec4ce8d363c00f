// Measures the speed of the chosen model, and shows it next to what the documentation states of other machines.

import { ApiError, stream } from "./api.js";
import { announce, byId, closable, element } from "./dom.js";
import { modelName } from "./models.js";
import { duration, tokenRate } from "./results.js";
import { decimal, text } from "./texts.js";

const ROUNDS = 3;
const TOKENS = 64;
const SIDE = 448; // pixels
const SQUARE = 28;
const LETTERS = "abcdefghijklmnopqrstuvwxyz";

/** Of docs/performance.md: milliseconds to the first token with a new image, and for each further token of a text. */
const DOCUMENTED = [
  { machine: "AMD EPYC, AVX-512", model: "small", first: 1110, token: 21.3 },
  { machine: "Intel Xeon, AMX", model: "small", first: 290, token: 27.8 },
];

let controller = null;

/** Set up the button and the dialog. */
export function openMeasurement() {
  const dialog = byId("measure-dialog");
  closable(dialog);
  byId("measure").addEventListener("click", () => {
    byId("measure-problem").textContent = "";
    drawRows(null);
    dialog.showModal();
  });
  byId("start-measurement").addEventListener("click", start);
  dialog.addEventListener("close", () => controller?.abort());
}

async function start() {
  const model = modelName();
  controller = new AbortController();
  showRunning(true);
  try {
    const result = await measured(model, controller.signal);
    drawRows({ machine: text("This server"), model, ...result });
    const values = { first: duration(result.first), speed: tokenRate(1000 / result.token) };
    announce(text("First token: {first}. Speed: {speed}.", values));
  } catch (error) {
    if (error instanceof ApiError) byId("measure-problem").textContent = error.message;
    else if (error.name !== "AbortError") throw error;
  } finally {
    showRunning(false);
  }
}

/** Medians, in milliseconds. The first request is not counted: it may load the model. */
async function measured(model, signal) {
  const firsts = [];
  const tokens = [];
  const total = 1 + 2 * ROUNDS;
  const next = async (prompt, count) => {
    const time = await timed({ model, messages: [{ role: "user", content: prompt }], ...exactly(count) }, signal);
    byId("measure-progress").value += 1 / total;
    return time;
  };
  await next(imageParts(), 1);
  for (let round = 0; round < ROUNDS; round += 1) firsts.push((await next(imageParts(), 1)).first);
  for (let round = 0; round < ROUNDS; round += 1) tokens.push((await next(words(8), TOKENS)).token);
  return { first: median(firsts), token: median(tokens) };
}

const exactly = (count) => ({ temperature: 0, max_tokens: count, min_tokens: count, ignore_eos: true });

async function timed(request, signal) {
  const start = performance.now();
  let first = 0;
  let last = 0;
  let count = 0;
  for await (const chunk of stream(request, signal)) {
    count = chunk.usage?.completion_tokens ?? count;
    if (!chunk.choices?.length) continue;
    last = performance.now();
    first ||= last;
  }
  return { first: first - start, token: (last - first) / Math.max(1, count - 1) };
}

const median = (values) => values.toSorted((one, other) => one - other)[Math.floor(values.length / 2)];

const random = (limit) => Math.floor(Math.random() * limit);

/** Made-up words, so that no cache knows the prompt. */
const words = (count) =>
  Array.from({ length: count }, () => LETTERS[random(26)] + LETTERS[random(26)]).join(" ");

function imageParts() {
  const canvas = element("canvas", { width: SIDE, height: SIDE });
  const context = canvas.getContext("2d");
  for (let x = 0; x < SIDE; x += SQUARE) {
    for (let y = 0; y < SIDE; y += SQUARE) {
      context.fillStyle = `rgb(${random(256)} ${random(256)} ${random(256)})`;
      context.fillRect(x, y, SQUARE, SQUARE);
    }
  }
  return [
    { type: "image_url", image_url: { url: canvas.toDataURL("image/jpeg", 0.9) } },
    { type: "text", text: `What is there to see, ${words(3)}?` },
  ];
}

function showRunning(isRunning) {
  if (isRunning) byId("measure-problem").textContent = "";
  byId("measure-progress").value = 0;
  byId("measure-progress").hidden = !isRunning;
  byId("start-measurement").disabled = isRunning;
}

function drawRows(own) {
  byId("measure-rows").replaceChildren(...[...(own ? [own] : []), ...DOCUMENTED].map(row));
  byId("measure-rows").firstElementChild.classList.toggle("own", own !== null);
}

const row = ({ machine, model, first, token }) =>
  element(
    "tr",
    {},
    element("th", { scope: "row" }, machine),
    element("td", {}, model),
    element("td", {}, duration(first)),
    element("td", {}, decimal(1000 / token, 1)),
  );
