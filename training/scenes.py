"""Samples for tests, demonstrations and evaluation: images or a video, a question, and the correct answer.

`sample(task, seed)` is deterministic, and its samples do not occur in training, which uses different random seeds.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image as PILImage

from training import compose, out_of_scope, questions, tokenizer, user_scenes
from training.compose import Grid, Video
from training.drawing import SHAPES, Scene, render, render_video
from training.questions import Question
from training.tools import Tool, offer, system_message

LAYOUTS = ("after", "before", "labeled")
"""The question follows the images, precedes them, or follows images that are labeled one by one in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One question with its images or video and its correct answer."""

    task: str
    seed: int
    scenes: tuple[Scene, ...]
    """One per image or per frame."""
    is_video: bool
    question: str
    answer: str
    layout: str = "after"
    tools: tuple[Tool, ...] = ()
    """Tools that the prompt offers."""

    @property
    def images(self) -> list[PILImage.Image]:
        """The images in order; empty for a video."""
        return [] if self.is_video else [render(scene) for scene in self.scenes]

    @property
    def frames(self) -> list[PILImage.Image]:
        """The frames of the video; empty for images."""
        return render_video(list(self.scenes)) if self.is_video else []

    def content(self) -> list[dict[str, Any]]:
        """Return the parts of the user message in order: {"text": ...}, {"image": image} or {"video": frames}."""
        visuals: list[dict[str, Any]] = [{"type": "image", "image": image} for image in self.images]
        if self.is_video:
            visuals = [{"type": "video", "video": self.frames}]
        asked: list[dict[str, Any]] = [{"type": "text", "text": self.question}]
        if self.layout == "before":
            return asked + visuals
        if self.layout == "labeled":
            labels = [{"type": "text", "text": f"Picture {number}: "} for number in range(1, len(visuals) + 1)]
            visuals = [part for pair in zip(labels, visuals, strict=True) for part in pair]
        return visuals + asked

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation: the user message, and a system message if tools are offered."""
        user: dict[str, Any] = {"role": "user", "content": self.content()}
        if not self.tools:
            return [user]
        system = system_message(tokenizer.DEFAULT_SYSTEM, self.tools)
        return [{"role": "system", "content": system}, user]


Maker = Callable[[random.Random], "tuple[tuple[Scene, ...], bool, Question | None]"]


def sample(task: str, seed: int, layout: str = "after", *, with_tools: bool = False) -> Sample:
    """Create the sample of a task (a key of `TASKS` or `USER_TASKS`) with this seed; `with_tools` adds tools."""
    tools = offer(random.Random(f"tools {task} {seed}"), unseen=True) if with_tools else []
    rng = random.Random(f"sample {task} {seed}")
    while True:
        scenes, is_video, question = (TASKS | USER_TASKS)[task](rng)
        if question:
            return Sample(
                task=task, seed=seed, scenes=scenes, is_video=is_video, question=question.text, answer=question.answer,
                layout=layout, tools=tuple(tools),
            )  # fmt: skip


def _image(generator: questions.QuestionGenerator, *counts: int, clear: bool = False) -> Maker:
    """Create samples with one image of `counts` objects; `clear` keeps them off the center lines, so that each is in a
    corner."""

    def make(rng: random.Random) -> tuple[tuple[Scene, ...], bool, Question | None]:
        scene = compose.compose(rng, _grid(rng), rng.choice(counts), clear=clear)
        question = generator(rng, scene)
        # If fewer objects fit than requested, it would be another task.
        return (scene,), False, question if len(scene.objects) in counts else None

    return make


def _set(generator: questions.SetQuestionGenerator) -> Maker:
    def make(rng: random.Random) -> tuple[tuple[Scene, ...], bool, Question | None]:
        scenes = compose.compose_set(rng, _grid(rng), rng.choice((2, 2, 3)))
        return tuple(scenes), False, generator(rng, scenes)

    return make


def _change(rng: random.Random) -> tuple[tuple[Scene, ...], bool, Question | None]:
    scenes = compose.compose_change(rng, _grid(rng))
    return tuple(scenes), False, questions.changed(rng, scenes)


def _video(generator: questions.VideoQuestionGenerator, motions: tuple[str, ...], frames: tuple[int, ...]) -> Maker:
    def make(rng: random.Random) -> tuple[tuple[Scene, ...], bool, Question | None]:
        grid = compose.choose(rng, compose.VIDEO_GRIDS)
        length = min(rng.choice(frames), compose.longest_video(grid))
        video: Video = compose.compose_video(rng, grid, length, rng.choice(motions))
        return video.scenes, True, generator(rng, video)

    return make


def _plain(generator: Callable[[random.Random], Question | None]) -> Maker:
    def make(rng: random.Random) -> tuple[tuple[Scene, ...], bool, Question | None]:
        return (), False, generator(rng)

    return make


def _about_photo(rng: random.Random) -> tuple[tuple[Scene, ...], bool, Question | None]:
    scene = compose.compose_photo(rng, _grid(rng))
    return (scene,), False, out_of_scope.ask_about_photo(rng, scene, unseen=True)


def _centered(radius: int) -> Maker:
    """Create samples with one shape in the middle of a white image of 224 x 224 pixels."""

    def make(rng: random.Random) -> tuple[tuple[Scene, ...], bool, Question | None]:
        scene = user_scenes.centered(rng, radius)
        return (scene,), False, questions.describe(rng, scene)

    return make


def _programmed(shape: str) -> Maker:
    """Create samples with one shape in the middle of an image, as a few lines of a program draw it."""

    def make(rng: random.Random) -> tuple[tuple[Scene, ...], bool, Question | None]:
        scene = user_scenes.simplify(rng, user_scenes.centered(rng, rng.uniform(RADII[0], RADII[-1]), shape=shape))
        return (scene,), False, questions.describe(rng, scene)

    return make


def _drawn(*counts: int) -> Maker:
    """Create samples with one image as users draw them."""

    def make(rng: random.Random) -> tuple[tuple[Scene, ...], bool, Question | None]:
        scene = user_scenes.compose(rng, _grid(rng), rng.choice(counts))
        return (scene,), False, questions.describe(rng, scene) if len(scene.objects) in counts else None

    return make


def _many(rng: random.Random) -> tuple[tuple[Scene, ...], bool, Question | None]:
    scene = user_scenes.compose_many(rng, (6, 6))
    return ((scene,), False, questions.describe(rng, scene)) if scene else ((), False, None)


def _unknown(kind: str) -> Maker:
    """Create samples with one figure of a kind that the model does not know, at least 40 % of the side."""

    def make(rng: random.Random) -> tuple[tuple[Scene, ...], bool, Question | None]:
        scene = user_scenes.compose_unknown(rng, _grid(rng), kind, smallest=0.4)
        return (scene,), False, questions.describe(rng, scene)

    return make


def _topic(name: str, *counts: int) -> Maker:
    """Create samples about a topic of `out_of_scope`, in unseen words; -1 among `counts` stands for no image."""
    ask = out_of_scope.generator(name, unseen=True)

    def make(rng: random.Random) -> tuple[tuple[Scene, ...], bool, Question | None]:
        count = rng.choice(counts)
        return _plain(ask)(rng) if count < 0 else _image(ask, count)(rng)

    return make


def _grid(rng: random.Random) -> Grid:
    return compose.choose(rng, compose.IMAGE_GRIDS)


RADII = (15, 30, 45, 60, 75, 90, 105)
"""Radii in pixels of centered shapes."""
UNKNOWN_KINDS = (
    "letter", "word", "5 corners", "6 corners", "circle outline", "square outline", "bar chart", "line chart", "face",
    "heart",
)  # fmt: skip
_MOVING, _LENGTHS = ("steady", "pairs", "jump"), (3, 4, 5, 6, 8)

TASKS: dict[str, Maker] = {
    "describe_one": _image(questions.describe, 1),
    "describe_two": _image(questions.describe, 2),
    "list": _image(questions.describe, 3, 4),
    "count": _image(questions.count, 1, 2, 3, 4),
    "colour": _image(questions.color, 1, 2, 3, 4),
    "shape": _image(questions.shape, 1, 2, 3, 4),
    "corner": _image(questions.in_corner, 1, 2, 3, 4, clear=True),
    "where": _image(questions.where, 1, 2, 3, 4, clear=True),
    "side": _image(questions.side, 2, 3, 4),
    "exists": _image(questions.exists, 1, 2, 3, 4),
    "absent": _image(questions.absent, 1, 2, 3, 4),
    "empty": _image(questions.describe, 0),
    "outside": _image(questions.outside, 0, 1, 2, 3),
    "nth": _set(questions.nth),
    "which": _set(questions.which),
    "nth_colour": _set(questions.nth_colour),
    "each": _set(questions.each),
    "changed": _change,
    "motion": _video(questions.motion, _MOVING, _LENGTHS),
    "motion_still": _video(questions.motion, ("still",), (2, *_LENGTHS)),
    "motion_two_frames": _video(questions.motion, ("steady", "jump", "still"), (2,)),
    "clip": _video(questions.video_description, (*_MOVING, "still"), (2, *_LENGTHS)),
    "recolour": _video(questions.recolour, ("recolour",), (4, 5, 6, 8)),
    "chat": _plain(questions.chat),
    "no_picture": _plain(questions.no_image),
    "outside_text": _plain(questions.outside),
    "objects": _topic("objects", 0, 1, 2, 3),
    "reading": _topic("reading", 0, 1, 2, 3),
    "people": _topic("people", 0, 1, 2, 3),
    "knowledge": _topic("knowledge", -1),
    "requests": _topic("requests", -1, -1, 1, 2),
    "unknown": _topic("unknown", 1, 2, 3, 4),
    "photo": _about_photo,
    "describe_freely": _image(functools.partial(out_of_scope.describe, unseen=True), 1, 2),
}
"""The factory for samples of each task."""
USER_TASKS: dict[str, Maker] = {
    "drawn_one": _drawn(1),
    "drawn_more": _drawn(2, 3, 4),
    "drawn_many": _many,
    **{f"centered, radius {radius}": _centered(radius) for radius in RADII},
    **{f"drawn by a program: {shape}": _programmed(shape) for shape in SHAPES},
    **{f"unknown: {kind}": _unknown(kind) for kind in UNKNOWN_KINDS},
}
"""The same for images as users draw them."""
IMAGE_TASKS = tuple(list(TASKS)[:13])
SET_TASKS = ("nth", "which", "nth_colour", "each", "changed")
VIDEO_TASKS = ("motion", "motion_still", "motion_two_frames", "clip", "recolour")
TEXT_TASKS = ("chat", "no_picture", "outside_text")
CENTERED_TASKS = tuple(task for task in USER_TASKS if task.startswith("centered"))
UNKNOWN_TASKS = tuple(task for task in USER_TASKS if task.startswith("unknown:"))
OUT_OF_SCOPE_TASKS = (*out_of_scope.TOPICS,)
"""Tasks whose prompts are not phrased as in training."""
