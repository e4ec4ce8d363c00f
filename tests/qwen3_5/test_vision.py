"""Images and videos: the logits of whole prompts equal those of transformers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.media import Image, Video
from dashinfer_vlm_core.models.interface import PlaceholderSpan
from dashinfer_vlm_qwen3_vl import Qwen35
from tests.conversations import assistant, blurred_image, user
from tests.kernels import selector
from tests.qwen3_vl.oracle import Oracle

from .states import Sequences, Step

PROMPTS = {
    "image of odd size": [user(blurred_image(1, 131, 77), "What is this?")],
    "several images": [user("One ", blurred_image(2), ", two ", blurred_image(3, 60, 190), " and ", blurred_image(4))],
    "video": [user([blurred_image(seed, 64, 96) for seed in range(5, 9)], "Describe it.")],
    "several turns": [
        user([blurred_image(seed, 64, 96) for seed in range(9, 12)], "What happens?"),
        assistant("Nothing."),
        user(blurred_image(12, 90, 64), "And here?"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("checkpoint", ["dense", "moe"])
def test_logits_equal_transformers(request, checkpoint, name):
    folder, messages = request.getfixturevalue(checkpoint), PROMPTS[name]
    oracle, config = Oracle(folder), EngineConfig(device="cpu", dtype="float32")
    inputs = oracle.inputs(messages)
    with torch.no_grad():
        expected = oracle.model(**inputs).logits[0]

    family = Qwen35()
    spec = family.load_spec(folder)
    processor, layout = family.image_processor(spec, config), family.prompt_layout(spec)
    items = [processor.process(item) for item in media(messages)]
    embeddings = family.load_vision_encoder(spec, config, selector(config)).encode(items)
    ids = inputs["input_ids"][0]
    is_visual = ((ids == spec.tokens.image) | (ids == spec.tokens.video)).numpy()
    spans = placeholder_spans(is_visual, [item.tokens for item in items])
    visual = {span.start: embeddings[span.item][span.row : span.row + span.length] for span in spans}
    positions = torch.from_numpy(layout.positions(len(ids), spans, items))
    found = Sequences(folder).run(Step(0, ids), positions=positions, visual=visual)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-4)


def media(messages):
    for part in (part for message in messages for part in message["content"] if not isinstance(part, str)):
        if part["type"] == "image":
            yield Image(image=part["image"], path="here")
        elif part["type"] == "video":
            frames = np.stack([np.asarray(frame) for frame in part["video"]])
            yield Video(frames=frames, path="here", times=tuple(index / 2 for index in range(len(frames))))


def placeholder_spans(is_visual, tokens):
    """Return the spans of items with these numbers of tokens, in the order of the prompt."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_visual, [False]])))
    spans, item, row = [], 0, 0
    for start, stop in list(pairwise(edges))[::2]:
        spans.append(PlaceholderSpan(start=int(start), length=int(stop - start), item=item, row=row))
        row += int(stop - start)
        if row == tokens[item]:
            item, row = item + 1, 0
    return spans
