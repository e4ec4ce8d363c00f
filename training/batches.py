"""Pack scenes and questions into fixed-size rows for training.

A row starts with a prompt that all its questions share. Every question with its answer is a separate branch that
continues at the prompt's last position, so that each question is computed as if it were the only one.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from training import compose, drawing, figures, labels, out_of_scope, questions, tokenizer, tools, user_scenes
from training.compose import Grid
from training.network import Batch
from training.questions import Mention, Question
from training.sizes import FACTOR, PATCH

ROWS, LENGTH = 10, 192
"""Rows per batch and tokens per row."""
TOOL_ROWS, TOOL_LENGTH = 2, 768
"""The same for batches whose prompts offer tools, which take most of a row."""
TOOL_PROMPT = 560
"""Maximum number of tokens of the system message of such a row."""
LISTS = 0.22
"""Share of the rows with one image whose objects have a clear order: four random objects rarely do."""
MANY = 0.06
"""Share of the images as users draw them that show more objects than the model counts."""
PAIRS = 0.5
"""Share of the images of a set with two objects, which are easily confused with images of one object."""
MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of red, green and blue, 0 to 1: the values of CLIP, which Qwen2-VL uses."""

_ORDER = np.arange(4096)
_SYSTEMS = (
    "You answer questions about pictures.", "Answer in one short sentence.", "Be brief.", "You are a tiny model.",
    "You are a helpful vision assistant.", "Be polite.", "You are an assistant that describes images.", "",
)  # fmt: skip
_LABELS = (("Picture {}: ", ""), ("Picture {}: ", " "), ("Image {}: ", "\n"), ("Picture {}:", "\n"), ("", " and "))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The composition of a batch: weights of the kinds of rows, and factors for the weights of some questions."""

    images: float = 10.0
    sets: float = 5.0
    videos: float = 5.0
    text: float = 1.3
    more: Mapping[Callable[..., Question | None], float] = field(default_factory=dict)
    also: Mapping[Callable[..., Question | None], float] = field(default_factory=dict)
    """Other generators, with their weights, which create the share `also_share` of the questions of all rows."""
    also_share: float = 0.0
    photos: float = 0.0
    """Share of the rows with one image whose image is a photograph without shapes."""
    drawn: float = 0.0
    """Share of the rows with one image whose shapes are those of `user_scenes`."""
    extremes: user_scenes.Extremes = user_scenes.NEVER
    unknown: float = 0.0
    """Share of the rows with one image that shows something that the model does not know."""
    kinds: Mapping[str, float] = field(default_factory=lambda: figures.WEIGHTS)
    """Weights of the kinds of what it does not know."""
    tools: float = 0.0
    """Share of the batches whose prompts offer tools."""
    grids: Mapping[Grid, float] = field(default_factory=lambda: compose.IMAGE_GRIDS)
    """Sizes of the images, with their weights."""

    def pick(self, rng: random.Random, generators: Mapping[Any, float], shown: object) -> Question | None:
        """Choose a generator by weight and let it create a question."""
        if self.also and rng.random() < self.also_share:
            generators = self.also
        weights = [weight * self.more.get(generator, 1) for generator, weight in generators.items()]
        chosen: Callable[..., Question | None] = rng.choices(list(generators), weights)[0]
        return chosen(rng, shown)


@dataclass(frozen=True, slots=True)
class Visual:
    """An image (one scene) or a video (several scenes)."""

    scenes: tuple[drawing.Scene, ...]

    @property
    def steps(self) -> int:
        """Number of temporal patches."""
        return (len(self.scenes) + 1) // 2

    @property
    def video(self) -> bool:
        return len(self.scenes) > 1


class Mark(NamedTuple):
    """Tokens of a row that are about one object, and the index of the first token of its image or video."""

    tokens: range
    mention: Mention
    start: int


@dataclass(slots=True)
class Row:
    """A row under construction. Vision tokens are stored as -1 - (index among the row's vision tokens)."""

    grid: Grid
    length: int = LENGTH
    tokens: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    places: list[np.ndarray] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    shown: dict[int, int] = field(default_factory=dict)
    """Index of each image's first token in this branch."""
    tasks: list[str] = field(default_factory=list)
    next: int = 0
    branch: int = 0

    @property
    def remaining(self) -> int:
        return self.length - len(self.tokens)

    def write(self, text: str, *, learn: bool = False) -> None:
        ids = encode(text)
        self.tokens += ids
        self.targets += ids if learn else [-100] * len(ids)
        self.owners += [len(self.tasks)] * len(ids)
        self.segments += [self.branch] * len(ids)
        self.positions.append(np.broadcast_to(_ORDER[self.next : self.next + len(ids)], (3, len(ids))))
        self.next += len(ids)

    def show(self, visual: Visual, first: int, ordinal: int) -> None:
        """Append the vision tokens of a visual; `first` is the index of its first token in the row's features."""
        self.write("<|vision_start|>")
        rows, columns = self.grid
        shape = (visual.steps, rows, columns)
        count = visual.steps * rows * columns
        if self.branch == 0:
            self.places.append(_place_labels(shape, len(self.tokens), ordinal, visual.video))
        self.shown[ordinal] = len(self.tokens)
        self.tokens += range(-1 - first, -1 - first - count, -1)
        self.targets += [-100] * count
        self.owners += [-1] * count
        self.segments += [self.branch] * count
        self.positions.append(_block(shape) + self.next)
        self.next += max(shape)  # text continues after the largest position so far
        self.write("<|vision_end|>")

    def ask(self, question: Question, *, close: bool = False) -> None:
        self.write(question.text)
        self.reply(question, close=close)

    def reply(self, question: Question, *, close: bool = False) -> None:
        self.write("<|im_end|>\n<|im_start|>assistant\n")
        self._mark(question, len(self.tokens))
        self.write(f"{question.answer}<|im_end|>", learn=True)
        self.tasks.append(question.task)
        if close:
            self.write("\n<|im_start|>user\n")

    def _mark(self, question: Question, start: int) -> None:
        """Record the objects that the tokens of the answer at `start` must attend to; each is predicted one earlier."""
        ids = encode(question.answer)
        if question.about:
            self.marks.append(self._mark_of(question.about, range(start - 1, start + len(ids))))
        colors = [index for index, token in enumerate(ids) if token in _color_tokens()]
        for index, mention in zip(colors, question.named, strict=False):
            # The article, the color and the shape.
            self.marks.append(self._mark_of(mention, range(start + index - 2, start + index + 1)))

    def _mark_of(self, mention: Mention, tokens: range) -> Mark:
        return Mark(tokens=tokens, mention=mention, start=self.shown[mention.image])


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A row with its images or video."""

    row: Row
    visuals: tuple[Visual, ...]


_LIST_GENERATORS: dict[questions.QuestionGenerator, float] = {
    questions.describe: 4, questions.count: 1.5, questions.shape: 1, questions.color: 0.7, questions.side: 1,
    questions.exists: 0.7, questions.where: 0.7, questions.absent: 0.7,
}  # fmt: skip


@functools.lru_cache(maxsize=200_000)
def encode(text: str) -> list[int]:
    """Tokenize a part of the prompt that starts and ends at pre-tokenization boundaries. Do not modify the result."""
    return list(tokenizer.build().encode(text).ids)


def batch(rng: random.Random, rows: int = ROWS, mix: Mix | None = None) -> Batch:
    """Create a batch of one image size with all kinds of rows: images, sets, videos and plain text."""
    mix = mix or Mix()
    grid = compose.choose(rng, mix.grids)
    videos = mix.videos if grid in compose.VIDEO_GRIDS else 0.0
    sets = mix.sets if grid[0] * grid[1] <= 25 else mix.sets / 2
    makers = (_image_story, _set_story, _video_story, _text_story)
    chosen = rng.choices(makers, (mix.images, sets, videos, mix.text), k=rows)
    return pack([make(rng, grid, mix) for make in chosen], grid)


def tool_batch(rng: random.Random, mix: Mix) -> Batch:
    """Create a batch of prompts that offer tools, with one image or without."""
    grid = compose.choose(rng, mix.grids)
    return pack([_tool_story(rng, grid, mix) for _ in range(TOOL_ROWS)], grid)


def sight_batch(rng: random.Random, images: int) -> Batch:
    """Create a batch of images and pairs of frames without text, for the first stage."""
    grid = rng.choice(((4, 4), (4, 4), (3, 3), (5, 5), (3, 5), (5, 3), (4, 3), (3, 4)))
    visuals = []
    for _ in range(images):
        if rng.random() < 0.25:
            visuals.append(Visual(compose.compose_video(rng, grid, 2, rng.choice(("steady", "still"))).scenes))
        else:
            visuals.append(Visual((compose.compose(rng, grid, rng.choice((0, 1, 2, 2, 3, 4))),)))
    return pack([Story(row=Row(grid=grid), visuals=(visual,)) for visual in visuals], grid)


def pack(stories: Sequence[Story], grid: Grid) -> Batch:
    """Convert stories of one image size and row length to tensors."""
    count, size, length = len(stories), grid[0] * grid[1], stories[0].row.length
    tokens = np.full((count, length), encode("<|endoftext|>")[0])
    targets, segments = np.full((count, length), -100), np.full((count, length), -1)
    positions = np.zeros((3, count, length), np.int64)
    owners = np.zeros((count, length), np.int64)
    tasks: list[str] = []
    pointed: list[tuple[int, int, np.ndarray]] = []
    places, seen = [np.zeros((0, 5), np.int64)], tokenizer.VOCABULARY
    for index, story in enumerate(stories):
        row = story.row
        written = np.asarray(row.tokens, np.int64)
        tokens[index, : len(written)] = np.where(written < 0, seen - 1 - written, written)
        segments[index, : len(written)] = row.segments
        targets[index, : max(len(written) - 1, 0)] = row.targets[1:]
        owners[index, : max(len(written) - 1, 0)] = np.asarray(row.owners[1:], np.int64) + len(tasks)
        pointed += _pointers(index, story)
        tasks += row.tasks
        if row.positions:
            positions[:, index, : len(written)] = np.concatenate(row.positions, axis=1)
        places += [np.insert(part, 0, index, axis=1) for part in row.places]
        seen += sum(visual.steps for visual in story.visuals) * size
    visuals = [visual for story in stories for visual in story.visuals]
    return Batch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        segments=torch.from_numpy(segments),
        targets=torch.from_numpy(targets),
        patches=_patches(visuals, grid),
        grid=(2 * grid[0], 2 * grid[1]),
        cells=torch.from_numpy(_cells(visuals, grid)),
        places=torch.from_numpy(np.concatenate(places)),
        pointers=torch.tensor([pointer[:2] for pointer in pointed], dtype=torch.int64).view(-1, 2),
        spots=torch.from_numpy(np.stack([np.zeros(length, bool), *[pointer[2] for pointer in pointed]])[1:]),
        owners=torch.from_numpy(owners),
        tasks=tuple(tasks),
    )


def _pointers(index: int, story: Story) -> list[tuple[int, int, np.ndarray]]:
    """Return, for every token of an answer about one object, its row and index and the mask of the object's tokens."""
    found = []
    for tokens, mention, start in story.row.marks:
        seen = _cells([story.visuals[mention.image]], story.row.grid)[:, 0] == drawing.COLORS.index(mention.color)
        spots = np.zeros(story.row.length, bool)
        spots[start : start + len(seen)] = seen
        if spots.any():
            found += [(index, token, spots) for token in tokens]
    return found


@functools.cache
def _color_tokens() -> frozenset[int]:
    return frozenset(token for color in drawing.COLORS for token in encode(f" {color}"))


def cut(frames: torch.Tensor) -> torch.Tensor:
    """Convert uint8 frames (N, 2, H, W, 3) to normalized patches (N, H W / 196, 1176) in Qwen2-VL's order."""
    count, _, height, width, _ = frames.shape
    rows, columns = height // FACTOR, width // FACTOR
    values = frames.view(count, 2, rows, 2, PATCH, columns, 2, PATCH, 3).permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
    values = values.reshape(count, rows * columns * 4, 3, -1)  # permuted as bytes, which is faster
    scale, mean = 1 / (255 * torch.tensor(DEVIATION)), torch.tensor(MEAN) / torch.tensor(DEVIATION)
    return torch.addcmul(-mean[:, None], values.float(), scale[:, None]).flatten(2)


def _patches(visuals: Sequence[Visual], grid: Grid) -> torch.Tensor:
    pairs = [pair for visual in visuals for pair in _frames(visual, grid)]
    if not pairs:
        return torch.zeros((0, 4 * grid[0] * grid[1], 6 * PATCH * PATCH), dtype=torch.bfloat16)
    return cut(torch.from_numpy(np.stack(pairs))).to(torch.bfloat16)


def _frames(visual: Visual, grid: Grid) -> list[np.ndarray]:
    """Return pairs of frames, each uint8 (2, H, W, 3), at the model's input size."""
    size = (grid[1] * FACTOR, grid[0] * FACTOR)
    drawn = drawing.render_video(list(visual.scenes))
    frames = [np.asarray(frame if frame.size == size else frame.resize(size, 3)) for frame in drawn]
    frames += frames[-1:] * (len(frames) % 2)  # an odd last frame is repeated
    return [np.stack(frames[index : index + 2]) for index in range(0, len(frames), 2)]


def _cells(visuals: Sequence[Visual], grid: Grid) -> np.ndarray:
    found = [np.zeros((0, len(labels.CELLS)), np.int64)]
    for visual in visuals:
        scenes = visual.scenes + visual.scenes[-1:] * (len(visual.scenes) % 2)
        found += [labels.cells(first, second, grid) for first, second in zip(scenes[::2], scenes[1::2], strict=True)]
    return np.concatenate(found)


@functools.cache
def _block(shape: tuple[int, int, int]) -> np.ndarray:
    """Return the positions of vision tokens starting at zero, (3, tokens): time, row, column."""
    return np.indices(shape).reshape(3, -1)


def _place_labels(shape: tuple[int, int, int], start: int, ordinal: int, video: bool) -> np.ndarray:
    time, row, column = _block(shape)
    number = np.minimum(time, 3) if video else np.full_like(time, ordinal)
    return np.stack([start + np.arange(time.size), 4 * row // shape[1], 4 * column // shape[2], number], axis=1)


def _start(rng: random.Random, grid: Grid) -> Row:
    row = Row(grid=grid)
    system = rng.choice(_SYSTEMS) if rng.random() < 0.25 else tokenizer.DEFAULT_SYSTEM
    row.write(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n")
    return row


def _image_story(rng: random.Random, grid: Grid, mix: Mix) -> Story:
    scene, generators = _image(rng, grid, mix)
    ask = functools.partial(mix.pick, rng, generators, scene)
    return _story(rng, grid, (Visual((scene,)),), ask)


def _image(rng: random.Random, grid: Grid, mix: Mix) -> tuple[drawing.Scene, Mapping[Any, float]]:
    """Compose one image, and return it with the question generators about it."""
    if mix.photos and rng.random() < mix.photos:
        return compose.compose_photo(rng, grid), out_of_scope.PHOTO_GENERATORS
    if mix.unknown and rng.random() < mix.unknown:
        return user_scenes.compose_unknown(rng, grid, weights=mix.kinds), out_of_scope.PHOTO_GENERATORS
    if mix.drawn and rng.random() < mix.drawn:
        return _drawn(rng, grid, mix)
    if rng.random() < LISTS:
        return _list_scene(rng, grid), _LIST_GENERATORS
    count = rng.choices((0, 1, 2, 3, 4), (0.05, 0.22, 0.33, 0.24, 0.16))[0]
    return compose.compose(rng, grid, count, clear=rng.random() < 0.55), questions.IMAGE_GENERATORS


def _drawn(rng: random.Random, grid: Grid, mix: Mix) -> tuple[drawing.Scene, Mapping[Any, float]]:
    """Compose an image as users draw them, and return it with the question generators about it."""
    if rng.random() < MANY:
        many = user_scenes.compose_many(rng, grid)
        if many:
            return many, out_of_scope.MANY_GENERATORS
    count = rng.choices((1, 2, 3, 4), (0.5, 0.2, 0.16, 0.14))[0]
    return user_scenes.compose(rng, grid, count, mix.extremes), questions.IMAGE_GENERATORS


def _list_scene(rng: random.Random, grid: Grid) -> drawing.Scene:
    """Compose three or four objects, in a clear order from left to right if one is found in a few attempts."""
    count = rng.choice((3, 4, 4))
    for _ in range(12):
        scene = compose.compose(rng, grid, count)
        if len(scene.objects) == count and questions.description(scene):
            break
    return scene


def _set_story(rng: random.Random, grid: Grid, mix: Mix) -> Story:
    if rng.random() < 0.35:
        scenes = compose.compose_change(rng, grid)
    else:
        scenes = compose.compose_set(rng, grid, rng.choice((2, 2, 3)), pairs=PAIRS)
    ask = functools.partial(mix.pick, rng, questions.SET_GENERATORS, scenes)
    visuals = tuple(Visual((scene,)) for scene in scenes)
    if rng.random() < 0.1:
        return _turns_story(rng, grid, scenes, functools.partial(mix.pick, rng))
    return _story(rng, grid, visuals, ask)


def _video_story(rng: random.Random, grid: Grid, mix: Mix) -> Story:
    frames = min(rng.choice((2, 2, 2, 3, 4, 4, 4, 5, 6, 6, 7, 8, 8)), compose.longest_video(grid))
    motion = rng.choices(list(compose.MOTIONS), list(compose.MOTIONS.values()))[0]
    video = compose.compose_video(rng, grid, frames, motion)
    ask = functools.partial(mix.pick, rng, questions.VIDEO_GENERATORS, video)
    return _story(rng, grid, (Visual(video.scenes),), ask)


_TALKERS: dict[Callable[..., Question], float] = {questions.chat: 3, questions.no_image: 2, questions.outside: 4}


def _text_story(rng: random.Random, grid: Grid, mix: Mix) -> Story:
    row = _start(rng, grid)
    ask = functools.partial(_talk, rng, mix)
    if rng.random() < 0.3:
        row.ask(ask(), close=True)
    _branches(row, ask)
    return Story(row=row, visuals=())


def _talk(rng: random.Random, mix: Mix) -> Question:
    """Create a question without an image."""
    if mix.also and rng.random() < mix.also_share:
        return rng.choices(list(mix.also), list(mix.also.values()))[0](rng, None) or questions.chat(rng)
    generator: Callable[..., Question] = rng.choices(list(_TALKERS), list(_TALKERS.values()))[0]
    return generator(rng)


def _tool_story(rng: random.Random, grid: Grid, mix: Mix) -> Story:
    """Create a row with tools in the system message; the answers are those without tools."""
    row, offered = Row(grid=grid, length=TOOL_LENGTH), tools.offer(rng)
    system = rng.choice(_SYSTEMS) if rng.random() < 0.25 else tokenizer.DEFAULT_SYSTEM
    while len(encode(tools.system_message(system, offered))) > TOOL_PROMPT:
        offered.pop()
    row.write(f"<|im_start|>system\n{tools.system_message(system, offered)}<|im_end|>\n<|im_start|>user\n")
    if rng.random() < 0.35:
        _branches(row, functools.partial(_talk, rng, mix))
        return Story(row=row, visuals=())
    scene, generators = _image(rng, grid, mix)
    visuals = (Visual((scene,)),)
    _show_all(row, visuals)
    _branches(row, functools.partial(mix.pick, rng, generators, scene))
    return Story(row=row, visuals=visuals)


def _story(rng: random.Random, grid: Grid, visuals: tuple[Visual, ...], ask: Callable[[], Question | None]) -> Story:
    """Create a row with the images first (some with labels), in an earlier turn, or after the question."""
    row, layout = _start(rng, grid), rng.random()
    if layout < 0.25:
        _question_first(row, visuals, ask)
        return Story(row=row, visuals=visuals)
    label, glue = rng.choice(_LABELS) if layout > (0.75 if len(visuals) > 1 else 0.98) else ("", "")
    _show_all(row, visuals, label, glue)
    if layout < 0.4:
        first = ask() or questions.chat(rng)
        row.ask(first, close=True)
    gap = rng.choice(("", "", "", "\n", " ")) if layout > 0.6 else ""
    _branches(row, ask, gap or glue.replace(" and ", "\n"))
    return Story(row=row, visuals=visuals)


def _turns_story(
    rng: random.Random, grid: Grid, scenes: Sequence[drawing.Scene], pick: Callable[..., Question | None]
) -> Story:
    """Create a row with one image and a question about it, followed by the other images and questions about all."""
    visuals = tuple(Visual((scene,)) for scene in scenes)
    row, size = _start(rng, grid), grid[0] * grid[1]
    row.show(visuals[0], 0, 0)
    first = pick(questions.IMAGE_GENERATORS, scenes[0]) or questions.chat(rng)
    row.ask(first, close=True)
    for index, visual in enumerate(visuals[1:], 1):
        row.show(visual, index * size, index)
    _branches(row, functools.partial(pick, questions.SET_GENERATORS, scenes))
    return Story(row=row, visuals=visuals)


def _show_all(row: Row, visuals: Sequence[Visual], label: str = "", glue: str = "") -> None:
    first = 0
    for ordinal, visual in enumerate(visuals):
        text = (glue if ordinal else "") + label.format(ordinal + 1)
        if text:
            row.write(text)
        row.show(visual, first, ordinal)
        first += visual.steps * row.grid[0] * row.grid[1]


def _branches(row: Row, ask: Callable[[], Question | None], gap: str = "") -> None:
    """Fill the row with questions after the same prompt until the next one does not fit."""
    start = row.next
    asked: set[str] = set()
    for _ in range(24):
        question = ask()
        if question is None or question.text in asked:
            continue
        if _cost(question) + len(gap) > row.remaining:
            break
        asked.add(question.text)
        row.branch, row.next = row.branch + 1, start
        row.write(gap + question.text)
        row.reply(question)


def _question_first(row: Row, visuals: Sequence[Visual], ask: Callable[[], Question | None]) -> None:
    """Like `_branches`, but every branch has its own copy of the vision tokens after the question."""
    start = row.next
    shown = sum(2 + visual.steps * row.grid[0] * row.grid[1] for visual in visuals)
    for _ in range(16):
        question = ask()
        if question is None:
            continue
        if _cost(question) + shown > row.remaining:
            break
        row.branch, row.next = row.branch + 1, start
        row.write(question.text)
        _show_all(row, visuals)
        row.reply(question)


def _cost(question: Question) -> int:
    """Return the number of tokens of a question with its answer."""
    return len(encode(question.text)) + len(encode(question.answer)) + 6
