// Takes pictures with the camera, and of a screen, a window or a tab. What the browser does not offer is not shown:
// both require HTTPS or localhost, and phones have no screenshots.

import { byId, closable } from "./dom.js";
import { text } from "./texts.js";

/** Set up the buttons and the dialog. `onfile` receives a picture, `onproblem` why there is none. */
export function openCapture({ onfile, onproblem }) {
  byId("camera").hidden = !navigator.mediaDevices?.getUserMedia;
  byId("screenshot").hidden = !navigator.mediaDevices?.getDisplayMedia;
  openCamera(onfile, onproblem);
  byId("screenshot").addEventListener("click", async () => {
    const video = document.createElement("video");
    if (!(await show(video, () => navigator.mediaDevices.getDisplayMedia({ video: true }), onproblem))) return;
    await takePicture(video, "screenshot.png", "image/png", { onfile, onproblem });
    stop(video);
  });
}

function openCamera(onfile, onproblem) {
  const dialog = byId("camera-dialog");
  const video = byId("camera-image");
  const constraints = { video: { facingMode: "environment", width: { ideal: 1920 }, height: { ideal: 1080 } } };
  let waiting = false; // for the permission: a second stream would replace the first one, which nothing could stop
  closable(dialog);
  byId("camera").addEventListener("click", async () => {
    if (waiting) return;
    waiting = true;
    const shown = await show(video, () => navigator.mediaDevices.getUserMedia(constraints), onproblem);
    waiting = false;
    if (shown) dialog.showModal();
  });
  byId("take-picture").addEventListener("click", async () => {
    await takePicture(video, "camera.jpg", "image/jpeg", { onfile, onproblem });
    dialog.close();
  });
  dialog.addEventListener("close", () => stop(video));
}

/** Show what a device sends. Returns false if the user or the browser does not permit it. */
async function show(video, request, onproblem) {
  onproblem("");
  try {
    video.srcObject = await request();
    await video.play();
    return true;
  } catch (error) {
    stop(video);
    onproblem(reason(error));
    return false;
  }
}

/** Browsers report the same error when the user closes their dialog and when settings forbid access. */
function reason({ name, message }) {
  if (name === "NotAllowedError")
    return text("The browser permitted no access. Permit it in the settings of this site, then try again.");
  if (name === "NotFoundError") return text("The browser found no camera. Connect one, then try again.");
  return text("The picture could not be taken: {message}. Add a file instead.", { message });
}

function stop(video) {
  video.srcObject?.getTracks().forEach((track) => track.stop());
  video.srcObject = null;
}

async function takePicture(video, name, type, { onfile, onproblem }) {
  const canvas = document.createElement("canvas");
  canvas.width = video.videoWidth;
  canvas.height = video.videoHeight;
  canvas.getContext("2d").drawImage(video, 0, 0);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, type, 0.92));
  if (blob) onfile(new File([blob], name, { type }));
  else onproblem(reason({ message: `${canvas.width} × ${canvas.height}` }));
}
