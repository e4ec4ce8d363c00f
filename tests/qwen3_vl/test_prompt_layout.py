"""Timestamps, placeholders and positions of prompts equal transformers'."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.video_utils import VideoMetadata

from dashinfer_vlm_core.media import Grid
from dashinfer_vlm_core.models.interface import Patches, PlaceholderSpan
from dashinfer_vlm_qwen3_vl import Qwen3VL

from .tiny_qwen3 import IDS

START, END, IMAGE, VIDEO = (
    IDS[name] for name in ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
)


def item(t, h, w, times=()):
    kind = "video" if times or t > 1 else "image"
    grid = Grid(t, h, w)
    return Patches(
        pixels=np.zeros((0, 0), np.uint8), grid=grid, tokens=grid.patches // 4, kind=kind, path="here", times=times
    )


@pytest.fixture(scope="module")
def layout(dense):
    family = Qwen3VL()
    return family.prompt_layout(family.load_spec(dense))


def encode_in(oracle):
    return lambda text: oracle.tokenizer(text, add_special_tokens=False)["input_ids"]


CLIPS = {
    "even": (24.0, [0, 10, 20, 30]),
    "odd": (29.97, [0, 15, 30, 45, 60]),
    "long": (0.7, list(range(0, 400, 3))),
    "single": (10.0, [0]),
}


@pytest.mark.parametrize("name", CLIPS)
def test_video_expansion_equals_transformers(layout, oracle, name):
    fps, indices = CLIPS[name]
    clip = item(-(-len(indices) // 2), 4, 6, tuple(index / fps for index in indices))
    metadata = VideoMetadata(total_num_frames=indices[-1] + 1, fps=fps, frames_indices=list(indices))
    text = oracle.video_text(torch.tensor(clip.grid), metadata)
    token_ids, spans, leading_text = layout.expand(clip, encode_in(oracle))
    assert [*encode_in(oracle)(leading_text), *token_ids.tolist()] == encode_in(oracle)(text)
    assert [token_ids[start - 1] for start, _ in spans] == [START] * clip.grid.t
    assert [token_ids[start + length] for start, length in spans] == [END] * clip.grid.t
    assert all((token_ids[start : start + length] == VIDEO).all() for start, length in spans)
    assert sum(length for _, length in spans) == clip.tokens


def test_video_without_timestamps_is_sampled_at_the_models_rate(layout):
    assert layout.timestamps(item(2, 4, 4)) == [0.25, 1.25]


def prompt(layout, oracle, *parts):
    """Return token ids, spans and items of text (a number of tokens), images and videos."""
    ids, spans, items = [], [], []
    for part in parts:
        if isinstance(part, int):
            ids += [5] * part
            continue
        expansion = layout.expand(part, encode_in(oracle))
        row = 0
        for start, length in expansion.spans:
            spans.append(PlaceholderSpan(start=len(ids) + start, length=length, item=len(items), row=row))
            row += length
        ids += expansion.token_ids.tolist()
        items.append(part)
    return torch.tensor([ids]), spans, items


# A temporal position is never above the larger side, since each span is one frame. So transformers 5 and the published
# rule agree, for long videos of small frames too.
PROMPTS = {
    "text": [7],
    "image": [3, item(1, 4, 10), 5],
    "images": [3, item(1, 4, 10), 1, item(1, 8, 2), 2, item(1, 2, 2), 4],
    "video": [2, item(3, 4, 6, (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)), 3],
    "long video of small frames": [2, item(300, 2, 2, tuple(i / 2 for i in range(600))), 3],
    "mixed": [2, item(1, 6, 4), item(2, 4, 4, (0.0, 1.0, 2.0)), 3, item(1, 2, 8), 1],
}


@pytest.mark.parametrize("name", PROMPTS)
def test_positions_equal_transformers(layout, oracle, name):
    ids, spans, items = prompt(layout, oracle, *PROMPTS[name])
    grids = {
        kind: torch.tensor([list(each.grid) for each in items if each.kind == kind]) for kind in ("image", "video")
    }
    kinds = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
    expected, delta = oracle.model.model.get_rope_index(
        ids,
        mm_token_type_ids=kinds,
        image_grid_thw=grids["image"] if len(grids["image"]) else None,
        video_grid_thw=grids["video"] if len(grids["video"]) else None,
    )
    found = layout.positions(ids.shape[1], spans, items)
    np.testing.assert_array_equal(found, expected[:, 0].numpy())
    assert found.max() + 1 == ids.shape[1] + delta.item()


def test_text_continues_after_the_largest_position(layout, oracle):
    """The published rule itself: the largest position so far + 1, on all three axes."""
    ids, spans, items = prompt(layout, oracle, *PROMPTS["long video of small frames"])
    found = layout.positions(ids.shape[1], spans, items)
    for span in spans:
        after = span.start + span.length
        assert (found[:, after] == found[:, :after].max() + 1).all()
