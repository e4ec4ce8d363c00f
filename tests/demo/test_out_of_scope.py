"""Prompts about what the bundled model does not know: training and evaluation differ, and the answers are true."""

from __future__ import annotations

import random
import string

import pytest

from dashinfer_vlm_core.protocol.request import ChatRequest
from training import batches, compose, drawing, out_of_scope, questions, scenes, tokenizer, tools, train, vocabulary

pytestmark = pytest.mark.slow

FORMS = {**out_of_scope.TOPICS, "describe": out_of_scope.DESCRIBE}


def test_forms_of_evaluation_do_not_occur_in_training() -> None:
    trained = {form for forms in FORMS.values() for form in forms.trained}
    unseen = [form for forms in FORMS.values() for form in forms.unseen]
    assert not trained & set(unseen)
    assert len(unseen) == len(set(unseen))


@pytest.mark.parametrize("topic", FORMS)
def test_slots_are_word_lists(topic: str) -> None:
    for form in (*FORMS[topic].trained, *FORMS[topic].unseen):
        slots = [slot for _, slot, *_ in string.Formatter().parse(form) if slot]
        assert {slot.removeprefix("a_") for slot in slots} <= set(out_of_scope.WORDS), form


def test_held_out_words_do_not_occur_in_training() -> None:
    held_out = out_of_scope.WORDS["other_shape"][4::5]
    rng = random.Random(0)
    trained = " ".join(out_of_scope.ask("unknown", rng).text.lower() for _ in range(2000))
    unseen = " ".join(out_of_scope.ask("unknown", rng, unseen=True).text.lower() for _ in range(2000))
    assert [word for word in held_out if word in trained] == []
    assert [word for word in held_out if word not in unseen] == []


def test_unknown_shapes_and_colors_are_not_known() -> None:
    known = {*drawing.SHAPES, *drawing.COLORS}
    assert not known & {*out_of_scope.WORDS["other_shape"], *out_of_scope.WORDS["other_color"]}
    rng = random.Random(1)
    for unseen in (False, True):
        for _ in range(300):
            text = out_of_scope.ask("unknown", rng, unseen=unseen).text.lower()
            others = (*out_of_scope.WORDS["other_shape"], *out_of_scope.WORDS["other_color"])
            assert any(word in text for word in others), text


def test_descriptions_are_those_of_the_scene() -> None:
    rng = random.Random(2)
    for _ in range(50):
        scene = compose.compose(rng, (4, 4), rng.randint(0, 2))
        question = out_of_scope.describe(rng, scene)
        assert (question and question.answer) == questions.description(scene)
    missing = out_of_scope.describe(rng, None)
    assert missing
    assert missing.answer == vocabulary.NO_IMAGE
    assert out_of_scope.describe(rng, [scene, scene]) is None


def test_photos_have_no_shapes() -> None:
    answers = {scenes.sample("photo", seed).answer for seed in range(40)}
    assert answers == {vocabulary.NO_SHAPES, vocabulary.OUTSIDE}
    assert all(not scenes.sample("photo", seed).scenes[0].objects for seed in range(40))


@pytest.mark.parametrize("unseen", [False, True])
def test_offered_tools_are_valid(unseen: bool) -> None:
    rng = random.Random(3)
    for _ in range(30):
        offered = tools.offer(rng, unseen=unseen)
        request = ChatRequest.parse({"messages": [{"role": "user", "content": "Hello"}], "tools": offered})
        assert [tool.for_template() for tool in request.tools] == offered  # so the engine renders the trained prompt


def test_tool_batches_offer_tools_and_answer_in_text() -> None:
    mix = train.WIDEN
    for seed in range(2):
        batch = batches.tool_batch(random.Random(seed), mix)
        assert batch.tokens.shape == (batches.TOOL_ROWS, batches.TOOL_LENGTH)
        for tokens, segments, targets in zip(batch.tokens, batch.segments, batch.targets, strict=True):
            prompt = tokens[(segments == 0) & (tokens < tokenizer.VOCABULARY)].tolist()
            assert "<tools>" in tokenizer.build().decode(prompt)
            assert segments.max() > 1, "too little of the row is left for questions"
            answers = tokenizer.build().decode(targets[targets != -100].tolist())
            assert answers
            assert "<tool_call>" not in answers


def test_tuning_has_all_topics_and_keeps_the_earlier_tasks() -> None:
    mix = train.WIDEN
    tasks = {task for seed in range(10) for task in batches.batch(random.Random(seed), 8, mix).tasks}
    assert {*out_of_scope.TOPICS, "describe_freely", "empty"} <= tasks
    assert {"describe_one", "count", "corner", "nth", "changed", "motion", "recolour", "chat", "no_picture"} <= tasks


def test_drawn_images_are_added_to_the_earlier_tasks() -> None:
    tasks = {task for seed in range(40) for task in batches.batch(random.Random(seed), 8, train.DRAWN).tasks}
    assert {
        "many",
        "empty",
        "describe_one",
        "list",
        "count",
        "corner",
        "nth",
        "motion",
        "chat",
        *out_of_scope.TOPICS,
    } <= tasks
