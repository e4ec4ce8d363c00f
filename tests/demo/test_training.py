"""Training matches transformers, and a resumed run gives the same result as an uninterrupted one."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cases import cases
from tests.transformers_engine import TransformersEngine
from training import batches, compose, interpolate, labels, published, questions, tokenizer, train
from training.batches import Row, Story, Visual
from training.export import Published, export
from training.learner import Learner
from training.network import Architecture, Batch, FastRmsNorm
from training.questions import Question

GRID = (3, 4)
SMALL = Architecture(num_hidden_layers=2, depth=1)


@functools.cache
def form() -> Published:
    return Published(architecture=SMALL, tokenizer=tokenizer.build())


@pytest.fixture(scope="module")
def learner() -> Learner:
    """Return a new model that computes in fp32 with weights representable in bf16."""
    made = Learner(SMALL, seed=1)
    made.network.float()
    with torch.no_grad():
        for name, parameter in made.network.named_parameters():
            made.weights[name].copy_(made.weights[name].bfloat16())
            parameter.copy_(made.weights[name])
    return made


@pytest.fixture(scope="module")
def judge(learner: Learner, tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    folder = tmp_path_factory.mktemp("checkpoint")
    export(learner.weights, form(), folder)
    return TransformersEngine(folder)


def scene(seed: int, count: int) -> compose.Scene:
    return compose.compose(random.Random(seed), GRID, count)


def images() -> Story:
    visuals = tuple(Visual((scene(seed, 2),)) for seed in range(3))
    return story(visuals, "Picture {}: ")


def video() -> Story:
    return story((Visual(compose.compose_video(random.Random(1), GRID, 5, "steady").scenes),), "")


def story(visuals: tuple[Visual, ...], label: str) -> Story:
    """Return a story: a system prompt, the visuals, a first turn, then two questions as branches."""
    row, first = Row(grid=GRID), 0
    row.write("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    for number, visual in enumerate(visuals):
        if label:
            row.write(label.format(number + 1))
        row.show(visual, first, number)
        first += visual.steps * GRID[0] * GRID[1]
    row.ask(Question(text="What is this?", answer="A red circle.", task="one"), close=True)
    start = row.next
    for branch, (text, answer) in enumerate((("Where?", "In the top left."), ("How many shapes?", "Two.")), 1):
        row.branch, row.next = branch, start
        row.ask(Question(text=text, answer=answer, task="two"))
    return Story(row=row, visuals=visuals)


@pytest.mark.slow
@pytest.mark.parametrize("make", [images, video])
def test_branches_equal_plain_prompts_in_transformers(
    make: Callable[[], Story], learner: Learner, judge: TransformersEngine
) -> None:
    packed_story = make()
    batch = batches.pack([packed_story], GRID)
    with torch.no_grad():
        reading = learner.network.read(batch, learner.network.see(batch))
        logits = learner.network.logits(reading.last)
    kept = batch.targets[0] != -100
    for branch in (1, 2):
        chosen = (batch.segments[0] == 0) | (batch.segments[0] == branch)
        expected, positions = plain(judge, batch, chosen, packed_story.visuals)
        assert torch.equal(positions, batch.positions[:, 0, chosen])
        torch.testing.assert_close(logits[chosen[kept]], expected[kept[chosen]], atol=2e-5, rtol=0)


def plain(
    judge: TransformersEngine, batch: Batch, chosen: Tensor, visuals: tuple[Visual, ...]
) -> tuple[Tensor, Tensor]:
    """Return logits and positions of a branch that is run alone."""
    seen, is_video = batch.tokens[0, chosen] >= judge.model.config.text_config.vocab_size, visuals[0].video
    pad = judge.model.config.video_token_id if is_video else judge.model.config.image_token_id
    ids = torch.where(seen, pad, batch.tokens[0, chosen])[None]
    grid = torch.tensor([[visual.steps, *batch.grid] for visual in visuals])
    grids = {"video_grid_thw" if is_video else "image_grid_thw": grid}
    kinds = {"mm_token_type_ids": seen.long()[None] * (2 if is_video else 1), "attention_mask": torch.ones_like(ids)}
    values = {"pixel_values_videos" if is_video else "pixel_values": batch.patches.float().flatten(0, 1)}
    with torch.no_grad():
        judge.model.model.rope_deltas = None
        logits = judge.model(input_ids=ids, **kinds, **grids, **values).logits[0]
    positions, _ = judge.model.model.get_rope_index(ids, **kinds, **grids)
    return logits, positions[:, 0]


def test_patches_equal_image_processor(judge: TransformersEngine) -> None:
    drawn = torch.randint(0, 256, (84, 112, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = judge.processor(images=[drawn.numpy()], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(batches.cut(torch.stack([drawn, drawn])[None])[0], expected, atol=1e-6, rtol=0)


def test_rms_norm_gradients_equal_torch() -> None:
    torch.manual_seed(0)
    results = []
    x, weight, outer = torch.randn(6, 32), torch.randn(32), torch.randn(6, 32)
    for norm in (FastRmsNorm.apply, lambda x, weight, eps: torch.nn.functional.rms_norm(x, (32,), weight, eps)):
        own = x.clone().requires_grad_(), weight.clone().requires_grad_()
        value = norm(*own, 1e-6)
        results.append((value, *torch.autograd.grad((value * outer).sum(), own)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_labels_describe_the_cell() -> None:
    shown = scene(3, 1)
    item = shown.objects[0]
    found = labels.cells(shown, shown, GRID).reshape(*GRID, 5)
    row, column = int(item.y / shown.height * GRID[0]), int(item.x / shown.width * GRID[1])
    assert labels.COLORS[found[row, column, 0]] == item.color
    assert labels.SHAPES[found[row, column, 1]] == item.shape
    assert found[row, column, 2] == int(12 * item.x / shown.width)
    assert (found[..., 0] != labels.UNKNOWN).any()


def test_labels_describe_motion_between_two_frames() -> None:
    shown = compose.compose_video(random.Random(2), (4, 4), 2, "steady")
    motion = labels.cells(*shown.scenes, (4, 4))[:, 4]
    assert set(np.unique(motion[motion > 0])) == {1 + list(compose.DIRECTIONS).index(shown.direction or "")}


def test_answers_point_at_their_subject() -> None:
    batch = batches.batch(random.Random(3), 8)
    assert batch.spots.any(dim=1).all()
    for (row, index), spots in zip(batch.pointers.tolist(), batch.spots, strict=True):
        assert batch.targets[row, index] != -100
        assert (batch.tokens[row][spots] >= tokenizer.VOCABULARY).all()
        assert spots.nonzero().max() < index


@pytest.mark.slow
def test_every_question_generator_is_used_in_training() -> None:
    tasks = {task for seed in range(30) for task in batches.batch(random.Random(seed), 8).tasks}
    generators = len(questions.IMAGE_GENERATORS) + len(questions.SET_GENERATORS) + len(questions.VIDEO_GENERATORS)
    assert len(tasks) >= generators


def tiny_plan() -> train.Plan:
    stages = (
        train.Stage(name="see", steps=2, rate=1e-3, batches=2, sight_only=True),
        train.Stage(name="learn", steps=2, rate=1e-3, warmup=2, batches=2),
        train.Stage(name="settle", steps=2, rate=1e-3, cooldown=1.0, batches=2, pointing=0.1),
    )
    # Without bfloat16 instructions, the default takes three times as long.
    return train.Plan(name="tiny", stages=stages, sizes=SMALL, rows=2, sights=2, dtype=torch.float32)


def average(out: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(out / train.PROGRESS, weights_only=True)["learner"]["average"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 5])  # between two stages, and within the last
def test_resumed_run_equals_uninterrupted_run(
    stop: int, tmp_path: Path, whole_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.run(tiny_plan(), train.Conduct(out=tmp_path, processes=1, stop_after=stop))
    train.run(tiny_plan(), train.Conduct(out=tmp_path, processes=1))
    expected, found = average(whole_run), average(tmp_path)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert "step 6" in capsys.readouterr().out


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    train.run(tiny_plan(), train.Conduct(out=out, processes=1))
    return out


@pytest.mark.parametrize("other", [{"name": "other"}, {"start": Path("checkpoint")}])
def test_run_of_another_plan_is_not_resumed(other: dict[str, Any], tmp_path: Path) -> None:
    torch.save({**tiny_plan().identity, "step": 6}, tmp_path / train.PROGRESS)
    with pytest.raises(SystemExit, match=r"another run \(plan tiny, start None\): pass another --out"):
        train.run(replace(tiny_plan(), **other), train.Conduct(out=tmp_path, processes=1))


@cases(
    ("options", "message"),
    [
        (["--start", "checkpoint"], "--start: the plan scratch starts at random"),
        (["--plan", "tune"], "--plan tune continues from a checkpoint: pass --start"),
    ],
)
def test_plan_and_start_have_to_match(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train.main(["--out", str(tmp_path), *options])
    assert message in capsys.readouterr().err


def test_checkpoint_is_read_as_exported(learner: Learner, tmp_path: Path) -> None:
    export(learner.weights, form(), tmp_path)
    read = published.read(tmp_path)
    assert set(read) == {name for name in learner.weights if not name.startswith("heads.")}
    assert all(torch.equal(value, learner.weights[name]) for name, value in read.items())


@pytest.mark.slow
def test_tuning_continues_from_checkpoint_and_keeps_the_vision_encoder(learner: Learner, tmp_path: Path) -> None:
    export(learner.weights, form(), tmp_path / "start")
    stages = tuple(replace(stage, steps=1, warmup=0) for stage in train.TUNE.stages)
    plan = replace(train.TUNE, stages=stages, sizes=SMALL, start=tmp_path / "start", rows=2)
    train.run(plan, train.Conduct(out=tmp_path, processes=1))
    start, found = published.read(tmp_path / "start"), average(tmp_path)
    changed = {name for name, value in start.items() if not torch.equal(value, found[name])}
    assert changed
    assert all(name.startswith("model.") for name in changed)
    assert all((start[name] - found[name]).abs().max() < 1e-3 for name in changed)  # it did not start at random


def test_learning_rate_warms_up_and_decays() -> None:
    stage = train.Stage(name="x", steps=100, rate=1.0, warmup=10, cooldown=0.5, final=0.1, batches=1)
    rates = [stage.rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10:50] == pytest.approx([1.0] * 40)
    assert rates[99] == pytest.approx(0.1 + 0.9 * 0.02)
    assert rates[50:] == sorted(rates[50:], reverse=True)


def test_interpolation_is_between_both_checkpoints(tmp_path: Path) -> None:
    start, end = (tmp_path / name for name in ("start", "end"))
    for folder, value in ((start, 1.0), (end, 3.0)):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name, encoding="utf-8")
        save_file({"weight": torch.full((2,), value, dtype=torch.bfloat16)}, folder / "model.safetensors")
    interpolate.main([str(start), str(end), "--share", "0.75", str(tmp_path / "out")])
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["weight"].tolist() == [2.5, 2.5]
    assert weights["weight"].dtype == torch.bfloat16
    assert (tmp_path / "out" / "config.json").read_text(encoding="utf-8") == "start"
    save_file({"other": torch.zeros(2)}, end / "model.safetensors")
    with pytest.raises(ValueError, match="different tensors"):
        interpolate.interpolate(start, end, 0.5, tmp_path / "another")
