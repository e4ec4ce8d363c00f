"""Generated answers are true for their scenes and change with them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.cases import cases
from training import compose, drawing, questions, scenes, vocabulary
from training.drawing import Backdrop, Scene, SceneObject

SWAPPED = {"left": "right", "right": "left"}


def item(color: str, shape: str, x: float, y: float) -> SceneObject:
    rgb = drawing.paint(color, 0, 1, 1)
    return SceneObject(color=color, shape=shape, x=x, y=y, radius=12, tilt=0, rgb=rgb)


def scene(*objects: SceneObject) -> Scene:
    return Scene(width=112, height=112, objects=objects, backdrop=Backdrop(rgb=(255, 255, 255)))


def mirror(shown: Scene) -> Scene:
    """Mirror a scene horizontally, except for its backdrop, which no question is about."""
    objects = tuple(replace(each, x=shown.width - each.x, tilt=-each.tilt) for each in shown.objects)
    return replace(shown, objects=objects)


def ask(generator: Callable[..., questions.Question | None], shown: Any, wanted: str) -> str:
    """Return the answer to the first question that contains the wanted words."""
    for seed in range(500):
        question = generator(random.Random(seed), shown)
        if question and wanted.lower() in question.text.lower():
            return question.answer
    raise AssertionError(f"nobody asked about {wanted!r}")


RED_CIRCLE, BLUE_STAR = item("red", "circle", 25, 25), item("blue", "star", 85, 30)
GREEN_CROSS = item("green", "cross", 85, 85)


@cases(
    ("objects", "sentence"),
    [
        ((), "I see no shapes."),
        ((RED_CIRCLE,), "A red circle."),
        ((BLUE_STAR, RED_CIRCLE), "A red circle to the left of a blue star."),
        ((GREEN_CROSS, BLUE_STAR), "A blue star above a green cross."),
        ((RED_CIRCLE, GREEN_CROSS), None),
        (
            (item("pink", "square", 95, 60), RED_CIRCLE, item("orange", "star", 55, 80)),
            "A red circle, an orange star and a pink square, from left to right.",
        ),
        ((RED_CIRCLE, BLUE_STAR, GREEN_CROSS), None),
    ],
)
def test_descriptions(objects: tuple[SceneObject, ...], sentence: str | None) -> None:
    assert questions.description(scene(*objects)) == sentence


@cases(
    ("generator", "wanted", "answer"),
    [
        (questions.count, "", "There are three shapes."),
        (questions.color, "star", "The star is blue."),
        (questions.shape, "green", "The green shape is a cross."),
        (questions.in_corner, "top left", "A red circle."),
        (questions.in_corner, "bottom left", "Nothing."),
        (questions.where, "the star", "The star is in the top right."),
        (questions.where, "blue star", "The blue star is in the top right."),
        (questions.side, "on the left", "A red circle."),
        (questions.exists, "a cross", "Yes, there is a green cross."),
        (questions.exists, "a square", "No."),
        (questions.absent, "triangle", "I see no triangle."),
        (questions.absent, "purple", "I see no purple shape."),
    ],
)
def test_answers_about_one_image(generator: questions.QuestionGenerator, wanted: str, answer: str) -> None:
    assert ask(generator, scene(RED_CIRCLE, BLUE_STAR, GREEN_CROSS), wanted) == answer


def test_shape_near_center_line_is_in_no_corner() -> None:
    near = item("red", "circle", 112 * 0.58, 20)
    assert questions.corner(scene(near), near) is None
    assert questions.where(random.Random(0), scene(near)) is None
    assert questions.in_corner(random.Random(0), scene(near)) is None


@cases(
    ("generator", "wanted", "answer"),
    [
        (questions.nth, "first", "A red circle."),
        (questions.nth, "last", "A blue star above a green cross."),
        (questions.which, "red", "The first picture."),
        (questions.which, "cross", "The second picture."),
        (questions.nth_colour, "first", "It is red."),
        (questions.images, "how many", "There are two pictures."),
    ],
)
def test_answers_about_several_images(generator: questions.SetQuestionGenerator, wanted: str, answer: str) -> None:
    assert ask(generator, [scene(RED_CIRCLE), scene(BLUE_STAR, GREEN_CROSS)], wanted) == answer


@pytest.mark.parametrize(
    ("after", "answer"),
    [
        (item("cyan", "circle", 25, 25), "The circle changed from red to cyan."),
        (item("red", "cross", 25, 25), "The red circle became a cross."),
        (RED_CIRCLE, "Nothing changed."),
    ],
)
def test_answers_about_a_change(after: SceneObject, answer: str) -> None:
    assert ask(questions.changed, [scene(RED_CIRCLE, BLUE_STAR), scene(after, BLUE_STAR)], "") == answer


def test_unrelated_images_have_no_change() -> None:
    assert questions.changed(random.Random(0), [scene(RED_CIRCLE), scene(BLUE_STAR)]) is None


@pytest.mark.parametrize("task", ["where", "corner", "side", "describe_two"])
def test_mirrored_scene_swaps_left_and_right(task: str) -> None:
    for seed in range(60):
        sample = scenes.sample(task, seed)
        image = mirror(sample.scenes[0])
        assert mirror(image) == sample.scenes[0] or image != sample.scenes[0]
        for original, swapped in zip(sample.scenes[0].objects, image.objects, strict=True):
            place, mirrored = questions.corner(sample.scenes[0], original), questions.corner(image, swapped)
            assert (place is None) == (mirrored is None)
            if place and mirrored:
                assert mirrored.split()[0] == place.split()[0]
                assert mirrored.split()[1] == SWAPPED[place.split()[1]]


def test_mirrored_pair_has_mirrored_description() -> None:
    pair = scene(RED_CIRCLE, BLUE_STAR)
    assert questions.description(mirror(pair)) == "A blue star to the left of a red circle."


def test_reversed_video_moves_the_other_way() -> None:
    opposite = {"left": "right", "right": "left", "up": "down", "down": "up"}
    rng = random.Random(4)
    for _ in range(20):
        video = compose.compose_video(rng, (4, 4), 6, "steady")
        first, last = video.scenes[0].objects[0], video.scenes[-1].objects[0]
        assert video.direction is not None
        dx, dy = compose.DIRECTIONS[opposite[video.direction]]
        assert (first.x - last.x) * dx + (first.y - last.y) * dy > 0


@cases("task", scenes.TASKS)
def test_questions_and_answers_are_sentences(task: str) -> None:
    for seed in range(30):
        sample = scenes.sample(task, seed)
        assert sample.question.strip()
        assert "{" not in sample.question or task.startswith("outside")
        assert sample.answer[0].isupper()
        assert sample.answer.endswith((".", "!"))


def test_out_of_scope_questions_have_no_unfilled_slots() -> None:
    rng = random.Random(2)
    asked = [vocabulary.outside(rng) for _ in range(2000)]
    assert not [text for text in asked if any(f"{{{kind}}}" in text for kind in "nvqpwiy")]
    assert len(set(asked)) > 1000
