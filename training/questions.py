"""Questions about scenes with their correct answers.

Every asker returns None if the answer would be ambiguous: objects near the center lines are in no corner, and objects
on a diagonal have no order. Such questions occur neither in training nor in evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from training import vocabulary
from training.compose import CENTRE_MARGIN, Video
from training.drawing import COLORS, SHAPES, Scene, SceneObject

NUMBERS = ("no", "one", "two", "three", "four")
ORDINALS = ("first", "second", "third")
CORNERS = ("top left", "top right", "bottom left", "bottom right")
SIDE_MARGIN = 0.12
"""Objects whose centers are closer than this share of the canvas along an axis have no order on it."""
DIAGONAL = 1.6
"""Two objects are side by side (one above the other) if their distance along that axis is at least this many times the
distance along the other."""


class Mention(NamedTuple):
    """A reference to an object by its color, which is unique in a scene, and the index of its image."""

    color: str
    image: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question, its correct answer and its task."""

    text: str
    answer: str
    task: str
    about: Mention | None = None
    """The object that it is about, if it is about a single one."""
    named: tuple[Mention, ...] = ()
    """All objects that the answer names, in order."""


QuestionGenerator = Callable[[random.Random, Scene], "Question | None"]
SetQuestionGenerator = Callable[[random.Random, Sequence[Scene]], "Question | None"]
VideoQuestionGenerator = Callable[[random.Random, Video], "Question | None"]

_DESCRIBE = (
    "Describe the {picture}.", "Describe the {picture}.", "Describe this {picture}.", "Describe.", "describe",
    "What do you see?", "What do you see?", "What can you see?", "What do you see in this {picture}?", "What is this?",
    "What is in the {picture}?", "What is in the {picture}?", "What is in this {picture}?", "What's in this {picture}?",
    "What is shown here?", "What is shown in the {picture}?", "What does the {picture} show?", "Describe it.",
    "Tell me what you see.", "Describe this {picture} in one sentence.", "Describe the {picture} in detail.",
    "Please describe the {picture}.", "Can you describe this {picture}?", "What is it?", "Caption this {picture}.",
    "What's this?", "Look at this {picture}. What do you see?",
)  # fmt: skip
_LIST = ("List the shapes from left to right.", "List the shapes.", "Name the shapes.", "Which shapes do you see?")
_COUNT = (
    "How many shapes are there?", "How many shapes are in the {picture}?", "Count the shapes.", "How many shapes?",
    "How many objects do you see?", "How many shapes do you see?", "How many objects are in the {picture}?",
)  # fmt: skip
_COLOR = (
    "What colour is the {shape}?", "What color is the {shape}?", "Which colour is the {shape}?",
    "What is the colour of the {shape}?", "Tell me the color of the {shape}.", "What is the color of the {shape}?",
    "Which color does the {shape} have?",
)  # fmt: skip
_SHAPE = (
    "What shape is {color}?", "Which shape is {color}?", "What is the {color} shape?", "What is {color}?",
    "What is the shape of the {color} object?", "What shape is the {color} object?", "Name the {color} shape.",
)  # fmt: skip
_CORNER = (
    "What is in the {corner}?", "What is in the {corner} corner?", "What do you see in the {corner}?",
    "Which shape is in the {corner}?", "What is at the {corner}?", "What is in the {corner} of the {picture}?",
)  # fmt: skip
_WHERE = (
    "Where is the {thing}?", "Where is the {thing}?", "In which corner is the {thing}?", "Where can I see the {thing}?",
    "Where is the {thing} in the {picture}?", "Which corner is the {thing} in?",
)  # fmt: skip
_SIDES = {"left": "on the left", "right": "on the right", "top": "at the top", "bottom": "at the bottom"}
_SIDE = (
    "What is {side}?", "What is {side}?", "Which shape is {side}?", "What do you see {side}?",
    "What is {side} of the {picture}?",
)  # fmt: skip
_EXISTS = ("Is there {thing}?", "Do you see {thing}?", "Is there {thing} in the {picture}?", "Can you see {thing}?")
_EMPTY = (*_DESCRIBE, *_LIST, *_COUNT)

_NTH = (
    "What is in the {nth} {picture}?", "Describe the {nth} {picture}.", "What does the {nth} {picture} show?",
    "What do you see in the {nth} {picture}?", "What is in {picture} {number}?", "Describe {picture} {number}.",
)  # fmt: skip
_WHICH = (
    "Which {picture} has {thing}?", "Which {picture} shows {thing}?", "Which {picture} contains {thing}?",
    "In which {picture} is {thing}?", "Which one has {thing}?", "Which {picture} has {thing} in it?",
)  # fmt: skip
_NTH_COLOR = (
    "What colour is the shape in the {nth} {picture}?", "What color is the {nth} shape?",
    "What color is the shape in the {nth} {picture}?", "What colour is the shape in {picture} {number}?",
    "Which colour does the {nth} {picture} show?",
)  # fmt: skip
_CHANGED = (
    "What changed?", "What is different?", "What is the difference between the {picture}s?", "What has changed?",
    "What is the difference?", "Compare the two {picture}s.", "What is different in the second {picture}?",
)  # fmt: skip
_EACH = (
    "Describe the {picture}s.", "What do you see?", "What is in the {picture}s?", "Describe each {picture}.",
    "What do the {picture}s show?", "Describe these {picture}s.", "Describe them.", "What are these?", "Describe.",
)  # fmt: skip
_IMAGES = ("How many {picture}s are there?", "How many {picture}s do you see?", "How many {picture}s did I send?")

_MOTION = (
    "Which way does the {thing} move?", "In which direction does the {thing} move?", "Where does the {thing} move?",
    "How does the {thing} move?", "Which way is the {thing} moving?", "Which direction is the {thing} moving in?",
    "Does the {thing} move?", "Is the {thing} moving?", "Where is the {thing} going?", "How is the {thing} moving?",
)  # fmt: skip
_VIDEO = (
    "Describe the video.", "What happens in the video?", "What happens?", "What do you see?", "Describe.",
    "What is in the video?", "Describe this video.", "What is happening?", "What does the video show?",
    "What is going on in this video?", "Describe the clip.",
)  # fmt: skip
_RECOLOR = ("How does the colour change?", "What happens to the {shape}?", "How does the {shape} change?")
_AT_START = ("What colour is the {shape} at the start?", "What colour is the {shape} at first?")
_AT_END = ("What colour is the {shape} at the end?", "What colour does the {shape} become?")


def name(item: SceneObject) -> str:
    """Return the name of an object with its article: "a red circle"."""
    return with_article(f"{item.color} {item.shape}")


def with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def corner(scene: Scene, item: SceneObject) -> str | None:
    """Return the corner that an object is in; None near the center lines."""
    x, y = item.x / scene.width - 0.5, item.y / scene.height - 0.5
    if abs(x) < CENTRE_MARGIN or abs(y) < CENTRE_MARGIN:
        return None
    return f"{'top' if y < 0 else 'bottom'} {'left' if x < 0 else 'right'}"


def summary(scene: Scene) -> str | None:
    """Return the description of a scene without objects, or with more than the model counts; None for others."""
    if not scene.objects:
        return vocabulary.NOT_KNOWN if scene.figures else vocabulary.NO_SHAPES
    return vocabulary.MANY_SHAPES if len(scene.objects) >= len(NUMBERS) else None


def describe(rng: random.Random, scene: Scene) -> Question | None:
    """Ask for a description: one object by name, two with their relation, three or four from left to right."""
    count = len(scene.objects)
    answer = description(scene)
    if answer is None:
        return None
    task = ("empty", "describe_one", "describe_two", "list", "list", "many")[min(count, len(NUMBERS))]
    forms = _LIST if count > 2 and rng.random() < 0.4 else _DESCRIBE
    return _naming(_question(rng, task, forms, answer), [0])


def description(scene: Scene) -> str | None:
    """Return the sentence that describes a scene; None if the order of the objects is ambiguous."""
    if found := summary(scene):
        return found
    if len(scene.objects) == 1:
        return _sentence(name(scene.objects[0]))
    if len(scene.objects) == 2:
        return _relation(*scene.objects)
    ordered = sorted(scene.objects, key=lambda item: item.x)
    if any(right.x - left.x < SIDE_MARGIN * scene.width for left, right in pairwise(ordered)):
        return None
    *names, last = [name(item) for item in ordered]
    return _sentence(f"{', '.join(names)} and {last}, from left to right")


def count(rng: random.Random, scene: Scene) -> Question | None:
    number = len(scene.objects)
    if found := summary(scene):
        return _question(rng, "many" if number else "empty", _COUNT, found)
    answer = "There is one shape." if number == 1 else f"There are {NUMBERS[number]} shapes."
    return _question(rng, "count", _COUNT, answer)


def color(rng: random.Random, scene: Scene) -> Question | None:
    item = _only_of_its_shape(rng, scene)
    if item is None:
        return None
    return _question(rng, "colour", _COLOR, f"The {item.shape} is {item.color}.", Mention(item.color), shape=item.shape)


def shape(rng: random.Random, scene: Scene) -> Question | None:
    if not scene.objects:
        return None
    item = rng.choice(scene.objects)
    return _question(
        rng,
        "shape",
        _SHAPE,
        f"The {item.color} shape is a {item.shape}.",
        Mention(item.color),
        color=item.color,
    )


def in_corner(rng: random.Random, scene: Scene) -> Question | None:
    """Ask what is in a corner: one object, or nothing."""
    corners = [corner(scene, item) for item in scene.objects]
    if not corners or None in corners:
        return None
    asked = rng.choice([place for place in CORNERS if corners.count(place) < 2])
    if asked not in corners and rng.random() < 0.5:
        asked = rng.choice([place for place in corners if place is not None])
        if corners.count(asked) > 1:
            return None
    found = scene.objects[corners.index(asked)] if asked in corners else None
    answer = _sentence(name(found)) if found else "Nothing."
    return _question(rng, "corner", _CORNER, answer, Mention(found.color) if found else None, corner=asked)


def where(rng: random.Random, scene: Scene) -> Question | None:
    placed = [item for item in scene.objects if corner(scene, item)]
    if not placed:
        return None
    item = rng.choice(placed)
    unique = sum(other.shape == item.shape for other in scene.objects) == 1
    words = item.shape if unique and rng.random() < 0.6 else f"{item.color} {item.shape}"
    return _question(
        rng, "where", _WHERE, f"The {words} is in the {corner(scene, item)}.", Mention(item.color), thing=words
    )


def side(rng: random.Random, scene: Scene) -> Question | None:
    """Ask which of at least two objects is farthest to one side."""
    if len(scene.objects) < 2:
        return None
    asked = rng.choice(list(_SIDES))
    level, length = asked in ("left", "right"), scene.width if asked in ("left", "right") else scene.height
    ordered = sorted(scene.objects, key=lambda item: item.x if level else item.y, reverse=asked in ("right", "bottom"))
    gap = abs(ordered[0].x - ordered[1].x) if level else abs(ordered[0].y - ordered[1].y)
    if gap < SIDE_MARGIN * length:
        return None
    return _question(rng, "side", _SIDE, _sentence(name(ordered[0])), Mention(ordered[0].color), side=_SIDES[asked])


def exists(rng: random.Random, scene: Scene) -> Question | None:
    """Ask whether an object exists, by shape, by color or by both; the answer is yes with the object's name, or no."""
    seen = list(scene.objects)
    kind = rng.choice(("shape", "colour", "both"))
    if seen and rng.random() < 0.5:
        item = rng.choice(seen)
        if kind == "shape" and sum(other.shape == item.shape for other in seen) > 1:
            return None
        words = {"shape": item.shape, "colour": f"{item.color} shape", "both": f"{item.color} {item.shape}"}[kind]
        return _question(
            rng, "exists", _EXISTS, f"Yes, there is {name(item)}.", Mention(item.color), thing=with_article(words)
        )
    shapes, colors = {item.shape for item in seen}, {item.color for item in seen}
    other_shape = rng.choice([word for word in SHAPES if word not in shapes])
    other_color = rng.choice([word for word in COLORS if word not in colors])
    half_right = rng.choice((f"{rng.choice(COLORS)} {other_shape}", f"{other_color} {rng.choice(SHAPES)}"))
    words = {"shape": other_shape, "colour": f"{other_color} shape", "both": half_right}[kind]
    return _question(rng, "exists", _EXISTS, "No.", thing=with_article(words))


def absent(rng: random.Random, scene: Scene) -> Question | None:
    """Ask about an object that does not exist."""
    if not scene.objects:
        return _question(rng, "empty", _EMPTY, summary(scene) or "")
    shapes, colors = {item.shape for item in scene.objects}, {item.color for item in scene.objects}
    if rng.random() < 0.4:
        word = rng.choice([word for word in COLORS if word not in colors])
        return _question(rng, "absent", _SHAPE, f"I see no {word} shape.", color=word)
    word = rng.choice([word for word in SHAPES if word not in shapes])
    forms = (*_COLOR, *_WHERE)
    return _question(rng, "absent", forms, f"I see no {word}.", shape=word, thing=word)


def outside(rng: random.Random, scene: object = None) -> Question:
    """Ask something that this model cannot answer, regardless of the image."""
    return Question(text=vocabulary.outside(rng), answer=vocabulary.OUTSIDE, task="outside")


def chat(rng: random.Random) -> Question:
    """Make small talk without an image."""
    forms, answer = rng.choice(vocabulary.SMALL_TALK)
    return Question(text=rng.choice(forms), answer=answer, task="chat")


def no_image(rng: random.Random) -> Question:
    """Ask about an image that was not sent."""
    forms = rng.choice((_DESCRIBE, _COUNT, _COLOR, _SHAPE, _CORNER, _WHERE, _SIDE, _NTH, _WHICH, _CHANGED, _MOTION))
    words = {
        "shape": rng.choice(SHAPES),
        "color": rng.choice(COLORS),
        "corner": rng.choice(CORNERS),
        "number": "2",
        "side": rng.choice(list(_SIDES.values())),
        "nth": rng.choice(ORDINALS),
        "thing": rng.choice(SHAPES),
    }
    if forms is _WHICH:
        words["thing"] = f"the {words['thing']}"
    return _question(rng, "no_picture", forms, vocabulary.NO_IMAGE, **words)


def nth(rng: random.Random, scenes: Sequence[Scene]) -> Question | None:
    index = rng.randrange(len(scenes))
    answer = description(scenes[index])
    if answer is None or len(scenes[index].objects) > 2:
        return None
    return _naming(_question(rng, "nth", _NTH, answer, **_ordinal(rng, index, len(scenes))), [index])


def which(rng: random.Random, scenes: Sequence[Scene]) -> Question | None:
    """Ask which image has a shape, a color or both that only one of the images has."""
    index = rng.randrange(len(scenes))
    if not scenes[index].objects:
        return None
    item = rng.choice(scenes[index].objects)
    others = [other for i, scene in enumerate(scenes) if i != index for other in scene.objects]
    if rng.random() < 0.5:
        words, shared = item.shape, any(other.shape == item.shape for other in others)
        shared |= sum(other.shape == item.shape for other in scenes[index].objects) > 1
    elif rng.random() < 0.7:
        words, shared = f"{item.color} shape", any(other.color == item.color for other in others)
    else:
        words = f"{item.color} {item.shape}"
        shared = any((other.color, other.shape) == (item.color, item.shape) for other in others)
    if shared:
        return None
    asked = rng.choice((f"the {words}", with_article(words)))
    return _question(rng, "which", _WHICH, f"The {ORDINALS[index]} picture.", Mention(item.color, index), thing=asked)


def nth_colour(rng: random.Random, scenes: Sequence[Scene]) -> Question | None:
    index = rng.randrange(len(scenes))
    if len(scenes[index].objects) != 1:
        return None
    (item,) = scenes[index].objects
    answer = f"It is {item.color}."
    return _question(
        rng, "nth_colour", _NTH_COLOR, answer, Mention(item.color, index), **_ordinal(rng, index, len(scenes))
    )


def changed(rng: random.Random, scenes: Sequence[Scene]) -> Question | None:
    """Ask for the difference between two images of one scene; None for unrelated images."""
    if len(scenes) != 2 or len(scenes[0].objects) != len(scenes[1].objects):
        return None
    pairs = list(zip(scenes[0].objects, scenes[1].objects, strict=True))
    if any((old.x, old.y, old.radius) != (new.x, new.y, new.radius) for old, new in pairs):
        return None
    changes = [(old, new) for old, new in pairs if (old.color, old.shape) != (new.color, new.shape)]
    if not changes:
        return _question(rng, "changed", _CHANGED, "Nothing changed.")
    old, new = changes[0]
    if old.shape != new.shape:
        answer = f"The {old.color} {old.shape} became a {new.shape}."
    elif sum(item.shape == old.shape for item in scenes[0].objects) > 1:
        return None
    else:
        answer = f"The {old.shape} changed from {old.color} to {new.color}."
    return _question(rng, "changed", _CHANGED, answer, Mention(new.color, 1))


def each(rng: random.Random, scenes: Sequence[Scene]) -> Question | None:
    """Ask for a description of all images in order, if each shows one object."""
    if any(len(scene.objects) != 1 for scene in scenes):
        return None
    answer = _sentence("first " + ", then ".join(name(scene.objects[0]) for scene in scenes))
    return _naming(_question(rng, "each", _EACH, answer), range(len(scenes)))


def images(rng: random.Random, scenes: Sequence[Scene]) -> Question | None:
    return _question(rng, "pictures", _IMAGES, f"There are {NUMBERS[len(scenes)]} pictures.")


def motion(rng: random.Random, video: Video) -> Question | None:
    if not video.scenes[0].objects:
        return None
    item = video.scenes[0].objects[0]
    if video.recolored and rng.random() < 0.7:
        return None
    words = rng.choice((item.shape, "shape" if len(video.scenes[0].objects) == 1 else item.shape))
    about = None if video.recolored else Mention(item.color)
    return _question(rng, "motion", _MOTION, f"It {movement(video)}.", about, thing=words)


def video_description(rng: random.Random, video: Video) -> Question | None:
    if not video.scenes[0].objects:
        return _question(rng, "empty_clip", (*_VIDEO, *_MOTION), vocabulary.NO_SHAPES, thing="shape")
    item = video.scenes[0].objects[0]
    if video.recolored:
        return _question(rng, "recolour", _VIDEO, _recolouring(video))
    return _question(rng, "clip", _VIDEO, _sentence(f"{name(item)} {movement(video)}"), Mention(item.color))


def recolour(rng: random.Random, video: Video) -> Question | None:
    if not video.recolored:
        return None
    kind, shape_word = rng.randrange(3), video.scenes[0].objects[0].shape
    if kind == 0:
        return _question(rng, "recolour", _RECOLOR, _recolouring(video), shape=shape_word)
    forms = _AT_START if kind == 1 else _AT_END
    return _question(rng, "recolour", forms, f"It is {video.recolored[kind - 1]}.", shape=shape_word)


def video_color(rng: random.Random, video: Video) -> Question | None:
    if video.recolored:
        return None
    question = color(rng, video.scenes[0])
    return question and replace(question, task="clip_colour")


def movement(video: Video) -> str:
    """Return the predicate of the first object: "moves to the left"."""
    if video.direction is None:
        return "does not move"
    return f"moves {'to the ' if video.direction in ('left', 'right') else ''}{video.direction}"


IMAGE_GENERATORS: dict[QuestionGenerator, float] = {
    describe: 2.5, count: 1, color: 1, shape: 1, in_corner: 2.5, where: 2.5, side: 2, exists: 1.5, absent: 0.7,
    outside: 0.4,
}  # fmt: skip
"""Question generators about one image, with their weights in training."""
SET_GENERATORS: dict[SetQuestionGenerator, float] = {
    nth: 2.5,
    which: 3,
    nth_colour: 1,
    changed: 3,
    each: 1.5,
    images: 0.3,
}
VIDEO_GENERATORS: dict[VideoQuestionGenerator, float] = {motion: 3, video_description: 2, recolour: 2, video_color: 0.6}


def _recolouring(video: Video) -> str:
    before, after = video.recolored or ("", "")
    return f"The {video.scenes[0].objects[0].shape} changes from {before} to {after}."


def _relation(one: SceneObject, two: SceneObject) -> str | None:
    across, down = abs(one.x - two.x), abs(one.y - two.y)
    if across > DIAGONAL * down:
        left, right = sorted((one, two), key=lambda item: item.x)
        return _sentence(f"{name(left)} to the left of {name(right)}")
    if down > DIAGONAL * across:
        upper, lower = sorted((one, two), key=lambda item: item.y)
        return _sentence(f"{name(upper)} above {name(lower)}")
    return None


def _only_of_its_shape(rng: random.Random, scene: Scene) -> SceneObject | None:
    shapes = [item.shape for item in scene.objects]
    unique = [item for item in scene.objects if shapes.count(item.shape) == 1]
    return rng.choice(unique) if unique else None


def _ordinal(rng: random.Random, index: int, total: int) -> dict[str, str]:
    last = index == total - 1 and rng.random() < 0.15
    return {"nth": "last" if last else ORDINALS[index], "number": str(index + 1)}


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _question(
    rng: random.Random, task: str, forms: Sequence[str], answer: str, about: Mention | None = None, /, **words: str
) -> Question:
    image = rng.choice(("picture", "image", "picture", "image", "photo"))
    text = vary(rng, rng.choice(forms).format(picture=image, **words))
    return Question(text=text, answer=answer, task=task, about=about)


def _naming(question: Question, images: Sequence[int]) -> Question:
    """Add the objects that the answer names: its colors, one per image, with all remaining ones in the last image."""
    words = [word.strip(".,") for word in question.answer.split()]
    colors = [word for word in words if word in COLORS]
    places = [*images, *[images[-1]] * len(colors)]
    return replace(question, named=tuple(Mention(*pair) for pair in zip(colors, places, strict=False)))


def vary(rng: random.Random, text: str) -> str:
    """Vary punctuation and capitalization as users do, or request a short answer."""
    kind = rng.random()
    if kind < 0.05:
        return text.rstrip("?.")
    if kind < 0.10:
        return text[0].lower() + text[1:]
    if kind < 0.13:
        return text.rstrip("?.").lower()
    if kind < 0.17:
        return text + rng.choice((" Answer briefly.", " Answer in one sentence.", " Be brief."))
    return text
