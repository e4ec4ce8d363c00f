"""Ask about the last seconds of a camera, once a second: python camera.py [FOLDER | FILE | ADDRESS]"""

from __future__ import annotations

import argparse
import base64
import html
import importlib.util
import io
import math
import string
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from dashinfer_vlm_core import DashInferVLMError, Engine, EngineConfig
from dashinfer_vlm_core.concurrency.memory import resident_bytes

VIDEO = Path(__file__).resolve().parents[1] / "pictures/moving.mp4"
TEMPLATE = Path(__file__).with_name("page.html")
SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}
RATE = 2  # frames per second: the vision encoder takes two frames at once, so each second is encoded once
SIDE = 448
TIMEOUT = 10.0  # seconds without data after which a stream is considered lost
SHOWN = 20  # responses on the page
REPORTS = 10  # lines of figures about a simulation

Frames = Iterator[Image.Image]
Second = tuple[str, str]  # its frames as data: URLs


@dataclass(frozen=True)
class Response:
    """What the model said about the frames until a second, of which the last one is shown."""

    second: int
    text: str
    frame: str


def folder_frames(folder: Path) -> Frames:
    for path in sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES):
        with Image.open(path) as image:
            yield image.convert("RGB")


def video_frames(address: str) -> Frames:
    """Yield the frames at or after multiples of 1 / RATE seconds from the beginning of a file or a stream."""
    import av

    options = {"rtsp_transport": "tcp"} if address.startswith("rtsp") else {}
    first = None
    due = 0.0
    try:
        with av.open(address, options=options, timeout=TIMEOUT) as container:
            for frame in container.decode(video=0):
                first = frame.pts if first is None else first
                seconds = (frame.pts - first) * frame.time_base
                if seconds >= due:
                    yield frame.to_image()
                    due = (math.floor(seconds * RATE) + 1) / RATE
    except (av.FFmpegError, IndexError) as error:  # there is no video with the index 0
        raise OSError(f"{address} cannot be read as a video: {error}") from error


def simulated_frames(seconds: int) -> Frames:
    """Draw a circle that moves in the first three seconds of each minute, and the noise of a camera."""
    for number in range(seconds * RATE):
        minute, frame = divmod(number, 60 * RATE)
        moved = 6 * min(frame, 3 * RATE)
        x = 38 + (moved if minute % 2 == 0 else 36 - moved)
        image = Image.new("RGB", (112, 112), "white")
        ImageDraw.Draw(image).ellipse((x - 18, 38, x + 18, 74), "blue")
        yield Image.blend(image, Image.effect_noise(image.size, 32).convert("RGB"), 0.05)


def seconds_of(frames: Frames) -> Iterator[Second]:
    """Yield pairs of frames, without a last frame that has no second one."""
    for first in frames:
        second = next(frames, None)
        if second is not None:
            yield data_url(first), data_url(second)


def data_url(image: Image.Image) -> str:
    image.thumbnail((SIDE, SIDE))
    data = io.BytesIO()
    image.save(data, "jpeg", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"


def request(seconds: Iterable[Second], question: str) -> dict[str, Any]:
    """Return a request for a chat completion about a window of frames."""
    frames = [url for second in seconds for url in second]
    # `align`: the number of frames seldom changes their size, while the window fills.
    video = {"type": "video_url", "video_url": {"url": frames, "fps": RATE, "align": True}}
    content = [video, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 64}


class LiveReader:
    """Reads a stream in a thread, and keeps its last seconds: those that the model has no time for are skipped."""

    def __init__(self, seconds: Iterable[Second], limit: int) -> None:
        self._seconds = seconds
        self._waiting: deque[Second] = deque(maxlen=limit)
        self._changed = threading.Condition()
        self._ended = False
        self._error: OSError | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def __iter__(self) -> Iterator[list[Second]]:
        """Yield what has arrived since the last time, at least one second."""
        while new := self._take():
            yield new
        if self._error:
            raise self._error

    def _take(self) -> list[Second]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            new = list(self._waiting)
            self._waiting.clear()
            return new

    def _read(self) -> None:
        try:
            for second in self._seconds:
                with self._changed:
                    self._waiting.append(second)
                    self._changed.notify()
        except OSError as error:  # for the thread that iterates
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify()


def paced(seconds: Iterable[Second], interval: float) -> Iterator[list[Second]]:
    """Yield what was recorded, at the pace of a camera, or without waiting if the interval is 0."""
    due = time.monotonic()
    for second in seconds:
        time.sleep(max(0.0, due - time.monotonic()))
        yield [second]
        due += interval


class Window:
    """Asks an engine about a window of frames that moves on. Pairs that it had before are not encoded again."""

    def __init__(self, engine: Engine, question: str, length: int) -> None:
        self._engine = engine
        self._question = question
        self._seconds: deque[Second] = deque(maxlen=length)
        self._begin = time.monotonic()
        self._tokens = 0
        self._cached = 0
        self.requests = 0
        self.seconds = 0

    def ask(self, new: Sequence[Second]) -> Response:
        """Move the window on by new frames, and return the response to it."""
        self._seconds.extend(new)
        self.requests += 1
        self.seconds += len(new)
        response = self._engine.chat(request(self._seconds, self._question))
        usage = response.usage
        self._tokens += usage.prompt_tokens
        self._cached += usage.prompt_tokens_details.cached_tokens or 0
        return Response(self.seconds, response.choices[0].message.content, self._seconds[-1][-1])

    def figures(self) -> str:
        """Return a line about all requests so far."""
        rate = self.requests / (time.monotonic() - self._begin)
        vision = self._engine.stats().vision
        hits = vision.hits / max(1, vision.hits + vision.encoded)
        return (
            f"{self.requests} requests, {rate:.1f} per second, {hits:.0%} of the pairs of frames and"
            f" {self._cached / self._tokens:.0%} of the tokens from a cache, {resident_bytes() / 2**20:.0f} MiB"
        )


def write_page(file: Path, question: str, responses: Sequence[Response]) -> None:
    """Write the last frame with its response, and those before it; the browser loads the page again each second."""
    rows = "".join(f"<li><time>{row.second} s</time> {html.escape(row.text)}</li>\n" for row in reversed(responses))
    last = responses[-1]
    template = string.Template(TEMPLATE.read_text(encoding="utf-8"))
    page = template.substitute(
        question=html.escape(question), frame=last.frame, text=html.escape(last.text), responses=rows
    )
    unfinished = file.with_suffix(".part")
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(file)


def read_source(arguments: argparse.Namespace) -> Iterable[list[Second]]:
    if arguments.simulate:
        return paced(seconds_of(simulated_frames(round(3600 * arguments.simulate))), 0.0)
    if "://" in arguments.source:
        return LiveReader(seconds_of(video_frames(arguments.source)), arguments.seconds)
    path = Path(arguments.source)
    return paced(seconds_of(folder_frames(path) if path.is_dir() else video_frames(str(path))), 1.0)


def _window(text: str) -> int:
    seconds = int(text)
    if not 1 <= seconds <= 300:
        raise argparse.ArgumentTypeError("must be 1 to 300")
    return seconds


def _hours(text: str) -> float:
    hours = float(text)
    if not 0.001 <= hours <= 240:
        raise argparse.ArgumentTypeError("must be 0.001 to 240")
    return hours


def _check_source(parser: argparse.ArgumentParser, source: str) -> None:
    if "://" not in source and not Path(source).exists():
        parser.error(f"there is no file or folder {source}: pass one, or an address such as rtsp://")
    if not Path(source).is_dir() and not importlib.util.find_spec("av"):
        parser.error("videos need PyAV: run pip install av, or pass a folder of images")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ask about the last seconds of a camera, once a second.")
    parser.add_argument("source", nargs="?", default=str(VIDEO), help="images, a video, or an address such as rtsp://")
    parser.add_argument("--question", default="Which way does the circle move?")
    parser.add_argument("--model", default="demo", help="such as Qwen/Qwen3-VL-2B-Instruct")
    parser.add_argument("--seconds", type=_window, default=4, metavar="N", help="in the window; default 4")
    parser.add_argument("--output", type=Path, default=Path("camera.html"), help="default: camera.html")
    parser.add_argument("--simulate", type=_hours, metavar="HOURS", help="draw the frames, and do not wait")
    arguments = parser.parse_args()
    if not arguments.simulate:
        _check_source(parser, arguments.source)
    if arguments.output.is_dir():
        parser.error(f"--output: {arguments.output} is a folder: pass the name of a file")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    shown: deque[Response] = deque(maxlen=SHOWN)
    reported = max(1, round(3600 * (arguments.simulate or 0) / REPORTS))
    with Engine(EngineConfig(model=arguments.model)) as engine:
        window = Window(engine, arguments.question, arguments.seconds)
        for new in read_source(arguments):
            shown.append(window.ask(new))
            write_page(arguments.output, arguments.question, shown)
            if not arguments.simulate:
                print(f"{window.seconds} s: {shown[-1].text}", flush=True)
            elif window.requests % reported == 0:
                print(window.figures(), flush=True)
        if not shown:
            sys.exit(f"{arguments.source} has fewer than two frames.")
        if not arguments.simulate:
            print(window.figures())
    print(f"Page: {arguments.output}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit()
    except (DashInferVLMError, OSError) as error:
        sys.exit(str(error))
