"""What pruning visual tokens saves and costs: time to the first token, tokens, and right answers.

    python -m benchmarks.pruning [--model demo|FOLDER] [--questions FILE] [--count 5] [--rate 0.25 --rate 0.5]
        [any option of dashinfer-vlm serve]

FILE has a JSON object per line: `question`, `answer`, and the path of an `image` or a `video`. A response is right if
it is the answer, apart from case, spaces and a final period. Without FILE, the bundled model is asked COUNT questions
of each of its tasks with one image or a video. Each question is asked at all rates in turn, and nothing is cached.
"""

from __future__ import annotations

import base64
import io
import json
import mimetypes
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
from PIL import Image

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.cli.command import EngineCommand
from training import scenes

from .models import checkpoint

MAX_TOKENS = 64


class Question(NamedTuple):
    """A question about an image or a video.

    Attributes:
        source: the `image_url` or `video_url` of the part.
    """

    kind: Literal["image", "video"]
    source: dict[str, Any]
    text: str
    answer: str

    def request(self, rate: float) -> dict[str, Any]:
        part = {"type": f"{self.kind}_url", f"{self.kind}_url": self.source | {"pruning_rate": rate}}
        content = [part, {"type": "text", "text": self.text}]
        return {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


class Outcome(NamedTuple):
    """What came of a question.

    Attributes:
        seconds: time to the first token.
        tokens: of the prompt.
    """

    kind: Literal["image", "video"]
    seconds: float
    tokens: int
    pruned: int
    is_right: bool


def data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def png_url(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return data_url(stream.getvalue(), "image/png")


def drawn_questions(count: int) -> Iterator[Question]:
    """Yield questions of the bundled model's tasks with one image or a video."""
    for index in range(count):
        for task in (*scenes.IMAGE_TASKS, *scenes.VIDEO_TASKS):
            sample = scenes.sample(task, index)
            if sample.is_video:
                source = {"url": list(map(png_url, sample.frames))}
                yield Question("video", source, sample.question, sample.answer)
            else:
                yield Question("image", {"url": png_url(sample.images[0])}, sample.question, sample.answer)


def read_questions(file: Path) -> Iterator[Question]:
    for line in file.read_text().splitlines():
        fields = json.loads(line)
        kind: Literal["image", "video"] = "image" if "image" in fields else "video"
        path = file.parent / fields[kind]
        media_type = mimetypes.guess_type(path.name)[0] or f"{kind}/*"
        source = {"url": data_url(path.read_bytes(), media_type)}
        yield Question(kind, source, fields["question"], fields["answer"])


def ask(engine: Engine, question: Question, rate: float) -> Outcome:
    begin = time.perf_counter()
    chunks = engine.stream(question.request(rate))
    first = next(chunks)
    seconds = time.perf_counter() - begin
    rest = list(chunks)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in (first, *rest) if chunk.choices)
    usage = rest[-1].usage
    assert usage
    assert usage.prompt_tokens_details
    pruned: int = usage.prompt_tokens_details.model_dump().get("pruned_tokens", 0)
    return Outcome(question.kind, seconds, usage.prompt_tokens, pruned, normalized(text) == normalized(question.answer))


def normalized(text: str) -> str:
    return " ".join(text.lower().split()).removesuffix(".")


def measure(config: EngineConfig, questions: Sequence[Question], rates: Sequence[float]) -> dict[float, list[Outcome]]:
    outcomes: dict[float, list[Outcome]] = {rate: [] for rate in rates}
    with Engine(config) as engine:
        for question in questions[:1] + questions[-1:]:
            ask(engine, question, rates[-1])  # warms up lazily loaded parts
        for question in questions:
            for rate in rates:
                outcomes[rate].append(ask(engine, question, rate))
    return outcomes


def table(outcomes: dict[float, list[Outcome]]) -> str:
    lines = ["| Media | Rate | Questions | Prompt tokens | Pruned | First token (ms) | Right |", "|---|" + "---:|" * 6]
    for kind in ("image", "video"):
        for rate, found in outcomes.items():
            group = [outcome for outcome in found if outcome.kind == kind]
            if group:
                lines.append(
                    f"| {kind} | {rate:.0%} | {len(group)} | {statistics.mean(each.tokens for each in group):.0f}"
                    f" | {statistics.mean(each.pruned for each in group):.0f}"
                    f" | {1000 * statistics.median(each.seconds for each in group):.1f}"
                    f" | {statistics.mean(each.is_right for each in group):.0%} |"
                )
    return "\n".join(lines)


@click.command(cls=EngineCommand, help=__doc__)
@click.option("--questions", "file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--count", default=5, show_default=True, help="Questions per task of the bundled model.")
@click.option("--rate", "rates", type=float, multiple=True, default=(0.25, 0.5, 0.75), show_default=True)
def main(*, file: Path | None, count: int, rates: tuple[float, ...], config: EngineConfig) -> None:
    questions = list(read_questions(file) if file else drawn_questions(count))
    uncached = {"model": str(checkpoint(config.model)), "vision_cache_mib": 0, "prefix_cache": False}
    print(table(measure(config.model_copy(update=uncached), questions, (0.0, *rates))))


if __name__ == "__main__":
    main()
