"""The scene generator draws what it describes, and is deterministic for a seed."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.cases import cases
from training import compose, drawing, figures, questions, scenes, sizes, user_scenes, vocabulary

KINDS = ("describe_one", "list", "nth", "motion", "empty")


def pixels(sample: scenes.Sample) -> list[bytes]:
    return [image.tobytes() for image in (*sample.images, *sample.frames)]


@cases("task", scenes.TASKS | scenes.USER_TASKS)
def test_same_seed_gives_same_sample(task: str) -> None:
    one, two = scenes.sample(task, 7), scenes.sample(task, 7)
    assert one == two
    assert pixels(one) == pixels(two)


@pytest.mark.parametrize("task", KINDS)
def test_other_seeds_give_other_samples(task: str) -> None:
    drawn = {tuple(pixels(scenes.sample(task, seed))) for seed in range(10)}
    assert len(drawn) == 10


@cases("seed", range(40))
def test_thing_has_its_color_at_its_position(seed: int) -> None:
    scene = compose.compose(random.Random(seed), (4, 5), 1 + seed % 4)
    drawn = np.asarray(drawing.render(scene), np.int16)
    tolerance = 40 if scene.jpeg else 2  # lossy compression bleeds colors over the edges
    for item in scene.objects:
        found = drawn[int(item.y), int(item.x)]
        assert np.abs(found - item.rgb).max() <= tolerance, item


@pytest.mark.parametrize("shape", drawing.SHAPES)
def test_things_cover_the_area_of_their_shape(shape: str) -> None:
    shares = {
        "circle": 0.69,
        "square": 0.71,
        "triangle": 0.42,
        "star": 0.32,
        "cross": 0.54,
    }  # share of the bounding box
    item = drawing.SceneObject(color="red", shape=shape, x=60.3, y=58.7, radius=30, tilt=0.1, rgb=(255, 0, 0))
    backdrop = drawing.Backdrop(rgb=(0, 0, 0))
    scene = drawing.Scene(width=120, height=112, objects=(item,), backdrop=backdrop)
    covered = np.asarray(drawing.render(scene), np.float64)[..., 0].sum() / 255
    assert covered / (4 * 30 * 30) == pytest.approx(shares[shape], abs=0.02)


def test_things_do_not_touch_or_leave_the_canvas() -> None:
    rng = random.Random(5)
    for _ in range(200):
        scene = compose.compose(rng, compose.choose(rng, compose.IMAGE_GRIDS), 4)
        for index, item in enumerate(scene.objects):
            assert item.radius <= item.x <= scene.width - item.radius
            assert item.radius <= item.y <= scene.height - item.radius
            for other in scene.objects[:index]:
                apart = np.hypot(item.x - other.x, item.y - other.y)
                assert apart > item.radius + other.radius
                assert item.color != other.color


def test_canvas_has_requested_grid() -> None:
    rng = random.Random(6)
    for _ in range(300):
        grid = compose.choose(rng, compose.IMAGE_GRIDS)
        width, height = compose.canvas(rng, grid, odd=0.8)
        assert sizes.smart_resize(height, width) == (grid[0] * 28, grid[1] * 28)


def test_videos_are_short_enough_for_all_engines() -> None:
    for seed in range(60):
        sample = scenes.sample("clip", seed)
        rows, columns = (side // 28 for side in sizes.smart_resize(sample.scenes[0].height, sample.scenes[0].width))
        assert 2 <= len(sample.scenes) <= 2 * max(rows, columns)


@pytest.mark.parametrize("direction", compose.DIRECTIONS)
def test_moving_thing_moves_only_in_its_direction(direction: str) -> None:
    dx, dy = compose.DIRECTIONS[direction]
    rng, seen = random.Random(8), 0
    while seen < 20:
        video = compose.compose_video(rng, (4, 4), 6, rng.choice(("steady", "pairs", "jump")))
        if video.direction != direction:
            continue
        seen += 1
        first, last = video.scenes[0].objects[0], video.scenes[-1].objects[0]
        along = (last.x - first.x) * dx + (last.y - first.y) * dy
        aside = abs((last.x - first.x) * dy) + abs((last.y - first.y) * dx)
        assert along > 2 * aside
        assert along > 0.15 * video.scenes[0].width


def test_static_video_repeats_its_first_frame() -> None:
    video = compose.compose_video(random.Random(9), (4, 4), 6, "still")
    frames = drawing.render_video(list(video.scenes))
    assert video.direction is None
    assert len({frame.tobytes() for frame in frames}) == 1


def test_content_places_question_according_to_layout() -> None:
    after, before = scenes.sample("which", 3), scenes.sample("which", 3, "before")
    labeled = scenes.sample("which", 3, "labeled")
    assert after.content()[-1]["type"] == "text"
    assert before.content()[0]["type"] == "text"
    texts = [part["text"] for part in labeled.content() if part["type"] == "text"]
    assert texts[:2] == ["Picture 1: ", "Picture 2: "]


@cases("kind", figures.KINDS)
def test_unknown_figures_are_seen_in_pixels_and_have_no_description(kind: str) -> None:
    scene = user_scenes.compose_unknown(random.Random(3), (6, 6), kind)
    drawn = np.asarray(drawing.render(replace(scene, jpeg=None)), np.int16)
    empty = np.asarray(drawing.render(replace(scene, figures=(), jpeg=None)), np.int16)
    assert (np.abs(drawn - empty).max(axis=-1) > 30).mean() > 0.003
    assert questions.description(scene) == vocabulary.NOT_KNOWN


def test_users_shapes_have_any_size_and_stay_mostly_inside() -> None:
    rng, shares = random.Random(4), []
    for _ in range(400):
        scene = user_scenes.compose(rng, compose.choose(rng, compose.IMAGE_GRIDS), rng.randint(1, 4))
        for item in scene.objects:
            shares.append(2 * item.radius / min(scene.width, scene.height))
            keep = item.radius * (1 - user_scenes.CUT)
            assert keep - 1 <= item.x <= scene.width - keep + 1
            assert keep - 1 <= item.y <= scene.height - keep + 1
    assert min(shares) < 0.2
    assert max(shares) > 0.9


def test_more_objects_than_the_model_counts() -> None:
    rng = random.Random(5)
    scene = next(filter(None, (user_scenes.compose_many(rng, (6, 6)) for _ in range(50))))
    assert len(scene.objects) > 4
    question = questions.count(rng, scene)
    assert question
    assert question.answer == questions.description(scene) == vocabulary.MANY_SHAPES
