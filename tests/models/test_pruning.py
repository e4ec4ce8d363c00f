"""Pruned prompts equal transformers' inputs without the pruned tokens, in all families."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.testing import Script, scripted_registry
from tests import tiny
from tests.conversations import as_openai, blurred_image, user
from tests.qwen3_5 import tiny_qwen3_5
from tests.qwen3_vl import tiny_qwen3
from tests.qwen3_vl.oracle import Clip, Oracle
from tests.transformers_engine import TransformersEngine

FAMILIES = {
    "qwen2_vl": (tiny.write_checkpoint, TransformersEngine),
    "qwen2_5_vl": (tiny.write_qwen2_5_vl, lambda folder: TransformersEngine(folder, video_fps=4)),
    "qwen3_vl": (tiny_qwen3.write_checkpoint, Oracle),
    "qwen3_5": (tiny_qwen3_5.write_checkpoint, Oracle),
}
FPS = 4


def moving(frames, *, still=()):
    """Return frames with a square that moves from pair to pair over a background, except in the pairs of `still`."""
    place, made = 0, []
    for index in range(frames):
        place += index % 2 == 0 and index // 2 not in still
        frame = np.asarray(blurred_image(1)).copy()
        frame[20:50, 6 * place : 6 * place + 30] = np.asarray(blurred_image(90 + place, 30, 30))
        made.append(Image.fromarray(frame))
    return made


VIDEO = moving(7, still=(1,))
"""With more pairs than rows, text after a video would not continue as in transformers 5."""

IMAGE = blurred_image(5, 140, 112)
MESSAGES = [user("Before ", VIDEO, " between ", IMAGE, " and after.")]


class Family:
    """An engine that records the requests to its decoder, and transformers with the same checkpoint."""

    def __init__(self, engine, script, oracle):
        self.engine = engine
        self.script = script
        self.oracle = oracle

    def decoded(self, messages, **options):
        """Return what the decoder receives, and the usage; the options are those of images or videos."""
        body = as_openai(messages)
        for part in body[0]["content"]:
            if part["type"] != "text":
                part[part["type"]] |= options.get(part["type"], {})
                part[part["type"]] |= {"fps": FPS} if part["type"] == "video_url" else {}
        usage = self.engine.chat({"messages": body, "max_tokens": 1}).usage
        return self.script.requests[-1], usage

    @torch.no_grad()
    def reference(self, messages):
        """Return transformers' ids, positions and features of images and videos, not pruned."""
        if isinstance(self.oracle, Oracle):
            parts = [p | {"video": Clip(p["video"], fps=FPS)} if p["type"] == "video" else p
                     for p in messages[0]["content"]]  # fmt: skip
            inputs = self.oracle.inputs([messages[0] | {"content": parts}])
        else:
            inputs = self.oracle.inputs([messages])
        model = self.oracle.model.model
        grids = {name: inputs.get(name) for name in ("image_grid_thw", "video_grid_thw")}
        seconds = {name: inputs[name] for name in inputs if name == "second_per_grid_ts"}
        positions, _ = model.get_rope_index(
            inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], **grids, **seconds
        )
        features = {}
        if grids["image_grid_thw"] is not None:
            features["image"] = rows(model.get_image_features(inputs["pixel_values"], grids["image_grid_thw"]))
        if grids["video_grid_thw"] is not None:
            features["video"] = rows(model.get_video_features(inputs["pixel_values_videos"], grids["video_grid_thw"]))
        return inputs, positions[:, 0].numpy(), features


def rows(found):
    """Return [tokens, width], with the features for deeper layers in further columns."""
    layers = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
    return torch.cat([layer if isinstance(layer, torch.Tensor) else torch.cat(layer) for layer in layers], dim=-1)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    write, oracle = FAMILIES[request.param]
    folder = write(tmp_path_factory.mktemp(request.param))
    script = Script("a")
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", decoder="scripted", media_workers=0)
    with Engine(config, registry=scripted_registry(script)) as engine:
        yield Family(engine, script, oracle(folder))


def kept_by_evs(features, frames, rate):
    """EVS by its definition: the tokens of the first frame and those least similar to the previous frame."""
    places = features.reshape(frames, -1, features.shape[-1])
    change = 1 - torch.cosine_similarity(places[1:], places[:-1], dim=-1).flatten().double()
    count = max(places.shape[1], int(len(features) * (1 - rate)))
    order = sorted(range(len(change)), key=lambda index: -change[index])[: count - places.shape[1]]
    return [*range(places.shape[1]), *sorted(places.shape[1] + index for index in order)]


def embeddings(request, ids, token):
    """Return the visual tokens at the placeholders of a kind."""
    found = [span for span in request.spans if ids[span.start] == token]
    return torch.cat([span.tokens.embedding[span.row : span.row + span.stop - span.start] for span in found])


@pytest.mark.parametrize("rate", [0.25, 0.5, 0.75, 0.95])
def test_pruned_prompt_equals_transformers_inputs_without_tokens(family, rate):
    request, usage = family.decoded(MESSAGES, video_url={"pruning_rate": rate})
    inputs, positions, features = family.reference(MESSAGES)
    ids = inputs["input_ids"][0].numpy()
    video = family.oracle.model.config.video_token_id
    kept = kept_by_evs(features["video"], 4, rate)
    mask = ids != video
    mask[np.flatnonzero(ids == video)[kept]] = True

    np.testing.assert_array_equal(request.token_ids, ids[mask])
    np.testing.assert_array_equal(request.positions, positions[:, mask])
    torch.testing.assert_close(
        embeddings(request, request.token_ids, video), features["video"][kept], rtol=0, atol=1e-4
    )
    details = usage.prompt_tokens_details
    assert usage.prompt_tokens == mask.sum()
    assert (details.video_tokens, details.pruned_tokens) == (len(kept), len(features["video"]) - len(kept))


@pytest.mark.parametrize("rate", [0.25, 0.75])
def test_pruned_image_keeps_positions_of_diverse_tokens(family, rate):
    request, usage = family.decoded(MESSAGES, image_url={"pruning_rate": rate})
    inputs, positions, features = family.reference(MESSAGES)
    ids = inputs["input_ids"][0].numpy()
    image = family.oracle.model.config.image_token_id
    found = embeddings(request, request.token_ids, image)
    distances = torch.cdist(found, features["image"])
    kept = distances.argmin(dim=1).tolist()
    assert float(distances.amin(dim=1).max()) < 1e-3
    assert kept == sorted(set(kept))
    assert len(kept) == int(len(features["image"]) * (1 - rate)) == usage.prompt_tokens_details.image_tokens
    mask = ids != image
    mask[np.flatnonzero(ids == image)[kept]] = True
    np.testing.assert_array_equal(request.token_ids, ids[mask])
    np.testing.assert_array_equal(request.positions, positions[:, mask])


def test_unchanged_pairs_are_dropped_with_their_times(family):
    """The model sees the other pairs as if these had not been sampled, at their own times."""
    request, usage = family.decoded([user(VIDEO, "After.")], video_url={"min_change": 1})
    if isinstance(family.oracle, Oracle):
        clip = Clip([VIDEO[index] for index in (0, 1, 4, 5, 6)], fps=FPS, indices=[0, 1, 4, 5, 6])
        content = [{"type": "video", "video": clip}, {"type": "text", "text": "After."}]
        inputs = family.oracle.inputs([{"role": "user", "content": content}])
        ids = inputs["input_ids"]
        expected, _ = family.oracle.model.model.get_rope_index(
            ids, mm_token_type_ids=inputs["mm_token_type_ids"], video_grid_thw=inputs["video_grid_thw"]
        )
        np.testing.assert_array_equal(request.token_ids, ids[0])
        np.testing.assert_array_equal(request.positions, expected[:, 0])
    else:
        inputs, positions, _ = family.reference([user(VIDEO, "After.")])
        ids = inputs["input_ids"][0].numpy()
        places = np.flatnonzero(ids == family.oracle.model.config.video_token_id).reshape(4, -1)
        mask = np.ones(len(ids), bool)
        mask[places[1]] = False
        np.testing.assert_array_equal(request.token_ids, ids[mask])
        np.testing.assert_array_equal(request.positions, positions[:, mask])
    assert usage.prompt_tokens_details.video_tokens == 3 * 16
    assert usage.prompt_tokens_details.pruned_tokens == 16
