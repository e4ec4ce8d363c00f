"""Qwen2.5-VL equals transformers: configuration, positions, vision encoder, and the tokens of whole requests."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import save
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.vision_utils import get_vision_window_index

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.media import READERS, Grid, Image
from dashinfer_vlm_core.media.decoder import MediaDecoder
from dashinfer_vlm_core.media.frame_sampling import VideoSamplingPolicy
from dashinfer_vlm_core.models.coordinates import CoordinateSpec
from dashinfer_vlm_core.models.interface import Patches, PlaceholderSpan
from dashinfer_vlm_core.models.qwen2_vl import vit
from dashinfer_vlm_core.models.qwen2_vl.config import PREPROCESSOR
from dashinfer_vlm_core.models.spec import PixelSpec
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.protocol import MediaPart
from dashinfer_vlm_dashinfer.convert import unsupported
from dashinfer_vlm_langchain.profiles import profile_of
from dashinfer_vlm_qwen2_5_vl import Qwen25VL
from dashinfer_vlm_qwen2_5_vl.config import read_vision_config
from dashinfer_vlm_qwen2_5_vl.vit import window_order
from tests.cases import cases
from tests.conversations import CONVERSATIONS, as_openai, blurred_image, user
from tests.kernels import needs_native, selector
from tests.patches import normalize, random_patches
from tests.samples import encode_video
from tests.server.conftest import serving
from tests.tiny import MERGES, write_qwen2_5_vl
from tests.transformers_engine import TransformersEngine
from tests.waiting import HANG

FAMILY = "qwen2_5_vl"
COUNT = 16
VIDEO_FPS = 4
"""With 2 positions per second, frames advance by 1, and text after a video continues as in transformers 5."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_qwen2_5_vl(tmp_path_factory.mktemp(FAMILY))


@pytest.fixture(scope="module")
def oracle(folder):
    return TransformersEngine(folder, video_fps=VIDEO_FPS)


# Configuration ------------------------------------------------------------------------------------------------------

PUBLISHED = {  # hidden size, layers, heads, KV heads, MLP, vocabulary, tied, MLP of the vision encoder
    "3B": (2048, 36, 16, 2, 11008, 151936, True, 3420),
    "7B": (3584, 28, 28, 4, 18944, 152064, False, 3420),
    "32B": (5120, 64, 40, 8, 27648, 152064, False, 3456),
    "72B": (8192, 80, 64, 8, 29568, 152064, False, 3456),
}
PREPROCESSING = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
}


def write_published(folder, size="3B"):
    """Write the configuration files of a published checkpoint."""
    hidden, layers, heads, kv_heads, inner, vocabulary, tied, vision_inner = PUBLISHED[size]
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "eos_token_id": 151645,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 128000,
        "max_window_layers": 70,
        "model_type": FAMILY,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": vision_inner,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vocab_size": vocabulary,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / PREPROCESSOR).write_text(json.dumps(PREPROCESSING))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    return folder


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes_are_read(tmp_path, size):
    hidden, layers, heads, kv_heads, inner, vocabulary, tied, vision_inner = PUBLISHED[size]
    spec, vision = Qwen25VL().load_spec(write_published(tmp_path, size)), read_vision_config(tmp_path)

    text = spec.text
    attention = text.attention
    assert (text.hidden_size, len(text.layers), text.layers[0].mlp.intermediate_size) == (hidden, layers, inner)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (heads, kv_heads, 128)
    assert (text.vocab_size, text.tie_word_embeddings) == (vocabulary, tied)
    assert (attention.rotary.theta, attention.rotary.sections) == (1e6, (16, 24, 24))
    assert (text.norm, attention.bias, attention.head_norms, text.visual_levels) == ("rms_norm", True, False, 0)
    assert (spec.model_type, spec.max_model_len, spec.dtype) == (FAMILY, 128000, "bfloat16")
    assert (spec.tokens.image, spec.tokens.video, spec.tokens.stop) == (151655, 151656, (151645, 151643))
    assert spec.pixels == PixelSpec(max_pixels=12845056)
    assert spec.coordinates == CoordinateSpec(extent=None)
    assert spec.video == VideoSamplingPolicy(fps=2, min_frames=4, max_frames=768)
    assert (vision.hidden_size, vision.intermediate_size, vision.output_size) == (1280, vision_inner, hidden)
    assert (vision.window, vision.fullatt_block_indexes) == (4, {7, 15, 23, 31})
    assert vision.tokens_per_second == 2


def test_layout_written_by_transformers_is_read_alike(tmp_path):
    published, rewritten = tmp_path / "published", tmp_path / "rewritten"
    published.mkdir()
    AutoConfig.from_pretrained(write_published(published)).save_pretrained(rewritten)
    for name in ("generation_config.json", PREPROCESSOR):
        shutil.copy(published / name, rewritten)

    assert "text_config" in json.loads((rewritten / "config.json").read_text())
    assert read_vision_config(rewritten) == read_vision_config(published)
    found, expected = (Qwen25VL().load_spec(folder) for folder in (rewritten, published))
    assert (found.text, found.tokens, found.dtype) == (expected.text, expected.tokens, expected.dtype)


def test_absent_fields_have_the_values_of_transformers(tmp_path):
    """transformers 4.49 leaves out the fields of `vision_config` that have its default values."""
    expected = read_vision_config(write_published(tmp_path, "7B"))
    edit(tmp_path, "vision_config", {"hidden_size": 1280, "tokens_per_second": 2, "in_chans": 3})
    assert read_vision_config(tmp_path) == expected

    edit(tmp_path, "vision_config.tokens_per_second", None)
    config = AutoConfig.from_pretrained(tmp_path).vision_config
    found = read_vision_config(tmp_path)
    assert found.tokens_per_second == config.tokens_per_second == 4
    assert found.fullatt_block_indexes == set(config.fullatt_block_indexes)
    assert (found.window * 28, found.depth, found.intermediate_size, found.num_heads, found.output_size) == (
        config.window_size, config.depth, config.intermediate_size, config.num_heads, config.out_hidden_size
    )  # fmt: skip


def edit(folder, path, value):
    """Replace the field of `config.json` at `path`; None removes it."""
    values = fields = json.loads((folder / "config.json").read_text())
    *parents, last = path.split(".")
    for parent in parents:
        fields = fields[parent]
    fields.pop(last, None)
    if value is not None:
        fields[last] = value
    (folder / "config.json").write_text(json.dumps(values))


BROKEN = [
    ("model_type", "qwen2_vl", "Only 'qwen2_5_vl'"),
    ("vision_config.hidden_act", "gelu", "Supported are silu"),
    ("vision_config.intermediate_size", 0, "`vision_config.intermediate_size` must be a positive integer"),
    ("vision_config.num_heads", 7, "into heads"),
    ("vision_config.out_hidden_size", 3584, "`vision_config.out_hidden_size` is 3584, but the text model's is 2048"),
    ("vision_config.window_size", 27, "less than the 28 pixels"),
    ("vision_config.fullatt_block_indexes", [7, 32], "blocks from 0 to 31, got [7, 32]"),
    ("vision_config.fullatt_block_indexes", 7, "must be a list"),
    ("vision_config.tokens_per_second", 0, "`vision_config.tokens_per_second` must be a positive integer"),
    ("vision_config.in_chans", 4, "RGB"),
]


@pytest.mark.parametrize(("path", "value", "words"), BROKEN, ids=[f"{path}={value}"[:50] for path, value, _ in BROKEN])
def test_broken_field_is_named_with_its_file(tmp_path, path, value, words):
    edit(write_published(tmp_path), path, value)

    with pytest.raises(CheckpointError) as error:
        Qwen25VL().load_spec(tmp_path)

    assert words in error.value.message
    assert str(tmp_path / "config.json") in error.value.message


@pytest.mark.slow
def test_importing_the_plugin_does_not_import_torch():
    script = "import sys, dashinfer_vlm_qwen2_5_vl; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_adapters_report_the_family(folder):
    assert FAMILY in load_plugins(strict=True).families
    profile = profile_of(EngineConfig(model=str(folder)))
    assert (profile["image_inputs"], profile["video_inputs"], profile["max_input_tokens"]) == (True, True, 2048)
    assert (profile["tool_calling"], profile["structured_output"]) == (True, True)


# Positions ----------------------------------------------------------------------------------------------------------


def item(t, h, w, fps=None):
    """Return an image, or a video sampled at `fps`."""
    grid = Grid(t, h, w)
    return Patches(
        pixels=np.zeros((grid.patches, 1176), np.uint8),
        grid=grid,
        tokens=grid.patches // 4,
        kind="image" if t == 1 else "video",
        path="",
        sampled_fps=fps,
    )


def our_positions(folder, parts):
    """Return the positions of a prompt of `parts`: numbers of text tokens, images and videos."""
    items = [part for part in parts if not isinstance(part, int)]
    spans, length = [], 0
    for part in parts:
        if not isinstance(part, int):
            spans.append(PlaceholderSpan(start=length, length=part.tokens, item=len(spans)))
        length += part if isinstance(part, int) else part.tokens
    spec = Qwen25VL().load_spec(folder)
    return Qwen25VL().prompt_layout(spec).positions(length, spans, items)


def transformers_positions(model, parts):
    """Return `get_rope_index` of transformers."""
    kinds = torch.cat([
        torch.full((part,), 0) if isinstance(part, int) else torch.full((part.tokens,), 1 + (part.kind == "video"))
        for part in parts
    ])[None]  # fmt: skip
    visuals = [part for part in parts if not isinstance(part, int)]
    grids = {
        f"{kind}_grid_thw": torch.tensor([visual.grid for visual in visuals if visual.kind == kind])
        for kind in ("image", "video")
    }
    seconds = torch.tensor([2 / visual.sampled_fps for visual in visuals if visual.kind == "video"])
    positions, _ = model.model.get_rope_index(
        torch.zeros_like(kinds),
        mm_token_type_ids=kinds,
        second_per_grid_ts=seconds if len(seconds) else None,
        **{name: grid if len(grid) else None for name, grid in grids.items()},
    )
    return positions[:, 0]


AGREEING = {  # prompts where text after a video continues equally by the published rule and in transformers 5
    "text": [5],
    "image": [3, item(1, 8, 6), 4],
    "images": [1, item(1, 8, 6), 1, item(1, 4, 12), 2, item(1, 2, 2), 1],
    "2 fps": [2, item(3, 12, 8, fps=2.0), 5],
    "24 fps": [2, item(4, 8, 8, fps=24.0), 5],
    "0.9 fps": [2, item(2, 20, 8, fps=0.9), 5],
    "1.7 fps": [2, item(3, 12, 16, fps=1.7), 5],
    "29.97/15 fps": [2, item(5, 20, 4, fps=1.998), 5],
    "videos and images": [1, item(2, 8, 6, fps=2.0), 1, item(1, 4, 4), 2, item(3, 8, 10, fps=4.0), 3],
}


@cases("name", AGREEING)
def test_positions_equal_transformers(folder, oracle, name):
    found = our_positions(folder, AGREEING[name])

    assert found.tolist() == transformers_positions(oracle.model, AGREEING[name]).tolist()


@cases("fps", [2.0, 0.1, 1.998, 1 / 3, 5.7, 30.0])
def test_positions_of_long_videos_follow_published_rule(folder, oracle, fps):
    """Text continues at the largest position plus 1; transformers 5 continues at half the frame's larger side."""
    video = item(384, 4, 6, fps=fps)
    visual = oracle.model.model.get_vision_position_ids(3, torch.tensor(video.grid), 1, 2, 2 * (2 / fps))
    after = int(visual.max()) + 1

    found = our_positions(folder, [3, video, 2])

    assert found[:, :3].tolist() == [[0, 1, 2]] * 3
    assert found[:, 3:-2].tolist() == visual.tolist()
    assert found[:, -2:].tolist() == [[after, after + 1]] * 3


GOLDEN_STEPS = {2.0: range(2, 26, 2), 1.0: range(2, 50, 4), 0.5: range(2, 98, 8)}
"""Positions in time of a video's 12 steps, by its frames per second, in transformers 4.57.6. It rounds the seconds of a
step down to an integer, so that it agrees with later versions only for whole seconds."""
GOLDEN_AFTER = [[0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]]
"""Positions of two tokens of text, an image and two more tokens, relative to the largest position of the video + 1."""


@pytest.mark.parametrize("fps", GOLDEN_STEPS)
def test_positions_of_long_videos_equal_transformers_4(folder, fps):
    steps = GOLDEN_STEPS[fps]
    found = our_positions(folder, [2, item(12, 4, 6, fps=fps), 2, item(1, 4, 4), 2]).tolist()
    video = [[step for step in steps for _ in range(6)], [2, 2, 2, 3, 3, 3] * 12, [2, 3, 4] * 24]
    assert found == [
        [0, 1, *axis, *(steps[-1] + 1 + offset for offset in after)]
        for axis, after in zip(video, GOLDEN_AFTER, strict=True)
    ]


def test_video_without_times_has_default_interval(folder):
    """Precomputed embeddings do not specify them; the published default is one second per step of the grid."""
    assert our_positions(folder, [item(3, 2, 2)])[0].tolist() == [0, 2, 4]


@pytest.mark.parametrize(("fps", "requested"), [(10, None), (25, None), (30, 7.5), (12, 3.0)])
def test_sampled_fps_is_that_of_qwen_vl_utils(fps, requested):
    data, policy = encode_video(48, fps=fps), VideoSamplingPolicy()
    part = MediaPart(kind="video", path="", url="data:", fps=requested)

    decoder = MediaDecoder(config=EngineConfig(), readers=READERS, policy=policy)
    video = decoder.decode(part, [data], lambda: None)

    assert video.sampled_fps == pytest.approx(len(video.frames) / 48 * fps)
    assert video.sampled_fps != pytest.approx((len(video.frames) - 1) / video.times[-1])


# Vision encoder -----------------------------------------------------------------------------------------------------

GRIDS = {
    "whole window": [(1, 8, 8)],
    "smaller than a window": [(1, 6, 4)],
    "partial windows": [(1, 10, 14)],
    "thin": [(1, 2, 22)],
    "large": [(1, 26, 34)],
    "video": [(3, 10, 6)],
    "mixed": [(2, 10, 8), (1, 8, 6), (3, 4, 4), (1, 12, 12), (1, 10, 8), (1, 2, 2)],
}


def load(folder, dtype="float32", **options):
    family, config = Qwen25VL(), EngineConfig(**{"device": "cpu", "dtype": dtype} | options)
    return family.load_vision_encoder(family.load_spec(folder), config, selector(config))


@pytest.fixture(scope="module")
def encoder(folder):
    return load(folder)


def batch_of(name):
    return [random_patches(*grid, seed=index) for index, grid in enumerate(GRIDS[name])]


@torch.no_grad()
def transformers_rows(model, batch):
    pixels = torch.cat([torch.from_numpy(normalize(patches.pixels, PixelSpec())) for patches in batch])
    rows = model.model.visual(pixels, torch.tensor([patches.grid for patches in batch])).pooler_output
    return torch.split(rows, [patches.tokens for patches in batch])


def assert_close(found, expected, *, rtol):
    """Assert that each pair of tensors differs by at most `rtol` of the largest value."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one.float() - other).abs().max() <= rtol * other.abs().max()


@pytest.mark.parametrize("window", [1, 3, 4, 9])
def test_window_order_equals_transformers(window):
    grids = [Grid(*grid) for grids in GRIDS.values() for grid in grids]

    order = window_order(grids, merge=2, window=window)

    units, bounds = get_vision_window_index(torch.tensor(grids), 2, window * 28, 14)
    assert order.units.tolist() == units.tolist()
    assert (4 * np.cumsum([0, *order.lengths])).tolist() == bounds.tolist()


@cases("name", GRIDS)
def test_encoder_equals_transformers(encoder, oracle, name):
    batch = batch_of(name)

    assert_close(encoder.encode(batch), transformers_rows(oracle.model, batch), rtol=1e-5)


def test_pass_reads_nothing_from_the_device(folder):
    """On the device `meta`, which has no values, reading one is an error. On a GPU, it would be a wait."""
    batch = batch_of("mixed")
    found = load(folder, device="meta").encode(batch)
    assert [len(rows) for rows in found] == [item.tokens for item in batch]


def test_batched_rows_equal_alone(encoder):
    batch = batch_of("mixed")
    alone = [encoder.encode([patches])[0] for patches in batch]

    assert_close(encoder.encode(batch), alone, rtol=1e-5)
    assert_close(encoder.encode(batch[::-1])[::-1], alone, rtol=1e-5)


@needs_native
def test_bfloat16_rows_are_close_and_bit_exact_in_any_batch(folder, oracle):
    encoder, batch = load(folder, "bfloat16"), batch_of("mixed")
    alone = [encoder.encode([patches])[0] for patches in batch]

    assert all(map(torch.equal, encoder.encode(batch), alone))
    assert all(map(torch.equal, encoder.encode(batch[::-1])[::-1], alone))
    assert_close(alone, transformers_rows(oracle.model, batch), rtol=0.05)


def test_large_batches_are_encoded_in_parts(encoder, monkeypatch):
    """Other work, such as decode steps, may run between them."""
    batch = batch_of("mixed")
    pixels = torch.from_numpy(np.concatenate([patches.pixels for patches in batch]))
    monkeypatch.setattr(vit, "EXCLUSIVE_FLOP", 1)
    monkeypatch.setattr(vit, "MIN_EXCLUSIVE_SECONDS", 0.0)

    inputs = encoder.model.inputs([patches.grid for patches in batch])
    parts = encoder.model.parts(encoder.normalize(pixels), inputs)

    assert sum(1 for _ in parts) == encoder.model.config.depth


def test_windows_matter(folder, tmp_path, oracle):
    """Otherwise the comparison would prove nothing."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    edit(tmp_path, "vision_config.window_size", 1120)
    batch = batch_of("partial windows")

    (found,), (expected,) = load(tmp_path).encode(batch), transformers_rows(oracle.model, batch)
    assert (found - expected).abs().max() > 0.05 * expected.abs().max()


@pytest.mark.parametrize("layout", ["published", "transformers 5"])
def test_tensor_names_of_both_layouts(encoder, folder, tmp_path, layout):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stored = load_file(folder / "model.safetensors")
    if layout == "transformers 5":
        stored = {
            f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1): value
            for name, value in stored.items()
        }
    assert ("visual.merger.ln_q.weight" in stored) is (layout == "published")
    save_file(stored, tmp_path / "model.safetensors")
    batch = batch_of("whole window")

    assert_close(load(tmp_path).encode(batch), encoder.encode(batch), rtol=0)


def test_tensor_of_another_shape_is_rejected(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    edit(tmp_path, "vision_config.intermediate_size", 48)

    with pytest.raises(CheckpointError, match=r"visual\.blocks\.0\.mlp\.gate_proj\.(weight|bias)"):
        load(tmp_path)


@pytest.mark.parametrize("size", [(112, 112), (100, 161), (37, 300)])
def test_image_processor_equals_transformers(folder, size):
    spec = Qwen25VL().load_spec(folder)
    image = blurred_image(1, *size)
    limits = {"shortest_edge": spec.pixels.min_pixels, "longest_edge": spec.pixels.max_pixels}
    expected = Qwen2VLImageProcessorPil(size=limits)(image, return_tensors="np")

    found = Qwen25VL().image_processor(spec, EngineConfig()).process(Image(image=image, path=""))

    assert [list(found.grid)] == expected["image_grid_thw"].tolist()
    np.testing.assert_allclose(normalize(found.pixels, spec.pixels), expected["pixel_values"], rtol=0, atol=1e-6)


# Requests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(folder):
    def start(**options):
        options = {"dtype": "float32", "video_fps": VIDEO_FPS, "kv_cache_mib": 64} | options
        return Engine(EngineConfig(model=str(folder), decoder="torch", device="cpu", **options))

    return start


@pytest.fixture(scope="module")
def engine(start):
    with start() as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(oracle):
    """Return transformers' completions as token ids."""
    return {name: oracle.generate([messages])[0][0][:COUNT] for name, messages in CONVERSATIONS.items()}


def body(name, **options):
    return {"messages": as_openai(CONVERSATIONS[name]), "temperature": 0, "max_tokens": COUNT, **options}


def token_ids(engine, name, **options):
    return list(engine.submit(body(name, **options)).result(timeout=HANG).token_ids[0])


def our_logprobs(engine, name, **options):
    """Return the token ids, and the five largest log-probabilities of each step whose token has text."""
    result = engine.submit(body(name, logprobs=True, top_logprobs=5, **options)).result(timeout=HANG)
    entries = result.completion.choices[0].logprobs.content
    return list(result.token_ids[0]), [[other.logprob for other in entry.top_logprobs] for entry in entries]


def transformers_logprobs(oracle, name):
    oracle.model.model.rope_deltas = None
    inputs = oracle.inputs([CONVERSATIONS[name]])
    output = oracle.model.generate(
        **inputs, do_sample=False, max_new_tokens=COUNT, output_logits=True, return_dict_in_generate=True
    )
    ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    steps = [step for step, token in enumerate(ids) if token < 256 + len(MERGES)]  # the others have no text
    assert steps
    return ids, [output.logits[step][0].log_softmax(-1).topk(5).values.tolist() for step in steps]


def covers(feature, name):
    return pytest.param(name, marks=pytest.mark.supports(feature, backend="torch-cpu", family="qwen2_5_vl"))


@pytest.mark.supports("logprobs", backend="torch-cpu", family="qwen2_5_vl")
@pytest.mark.parametrize(
    "name",
    [
        covers("text", "text"),
        covers("images", "one picture"),
        covers("images", "three pictures between text"),
        covers("videos", "video"),
        covers("videos", "video of an odd number of frames"),
        covers("videos", "picture and video"),
        "two turns",
    ],
)
def test_tokens_and_logprobs_equal_transformers(engine, oracle, name):
    ids, logprobs = our_logprobs(engine, name)
    expected_ids, expected = transformers_logprobs(oracle, name)

    assert ids == expected_ids
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_output_depends_on_every_part(expected):
    """Otherwise the comparison would prove nothing."""
    assert len(set(map(tuple, expected.values()))) == len(expected)


@pytest.mark.slow
@pytest.mark.supports("batching", backend="torch-cpu", family="qwen2_5_vl")
def test_batched_output_equals_alone(start, expected):
    async def all_at_once(engine):
        return await asyncio.gather(*(asyncio.to_thread(token_ids, engine, name) for name in expected))

    with start(prefix_cache=False) as engine:
        assert asyncio.run(all_at_once(engine)) == list(expected.values())


@pytest.mark.supports("chunked-prefill", backend="torch-cpu", family="qwen2_5_vl")
def test_chunked_output_equals_whole(start, expected):
    with start(prefill_chunk=13, prefix_cache=False) as engine:
        for name in ("three pictures between text", "video"):
            assert token_ids(engine, name) == expected[name], name


@pytest.mark.supports("prefix-cache", backend="torch-cpu", family="qwen2_5_vl")
def test_cached_output_equals_uncached(engine, expected):
    token_ids(engine, "picture and video")
    before = engine.stats()

    assert token_ids(engine, "picture and video") == expected["picture and video"]

    after = engine.stats()
    assert after.decoder.cached_tokens > before.decoder.cached_tokens
    assert after.vision.encoded == before.vision.encoded


@pytest.mark.supports("embeddings", backend="torch-cpu", family="qwen2_5_vl")
def test_embeddings_give_the_output_of_their_image(start, encoder, folder, expected):
    processor = Qwen25VL().image_processor(Qwen25VL().load_spec(folder), EngineConfig())
    image = processor.process(Image(image=blurred_image(1), path=""))
    tensors = {"image_embeds": encoder.encode([image])[0].numpy()}
    fields = {"image_embeds": base64.b64encode(save(tensors)).decode(), "image_grid_thw": list(image.grid)}
    messages = as_openai(CONVERSATIONS["one picture"])
    messages[0]["content"][0] = {"type": "image_embeds", "image_embeds": fields}

    with start(enable_mm_embeds=True) as engine:
        result = engine.submit(body("one picture") | {"messages": messages}).result(timeout=HANG)

    assert list(result.token_ids[0]) == expected["one picture"]


@needs_native
@pytest.mark.supports("int8", backend="torch-cpu", family="qwen2_5_vl")
def test_int8_logprob_is_close(start, engine):
    def first(engine):
        choice = engine.chat(body("one picture", logprobs=True, top_logprobs=1)).choices[0]
        return choice.logprobs.content[0]

    with start(dtype="bfloat16", quantization="int8") as quantized:
        found = first(quantized)
    assert found.token == first(engine).token
    assert found.logprob == pytest.approx(first(engine).logprob, abs=0.2)


SCHEMA = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["shape", "count"],
    "additionalProperties": False,
}


@pytest.mark.supports("structured-output", backend="torch-cpu", family="qwen2_5_vl")
def test_json_request_over_http(engine):
    schema = {"type": "json_schema", "json_schema": {"name": "shapes", "schema": SCHEMA, "strict": True}}
    messages = as_openai([user(blurred_image(3), [blurred_image(4), blurred_image(5)], "What is there?")])
    request = {"model": engine.config.model, "messages": messages, "response_format": schema, "max_tokens": 100}

    with serving(engine) as server, server.http() as client:
        response = client.post("/v1/chat/completions", json=request)

    assert response.status_code == 200, response.text
    answer = json.loads(response.json()["choices"][0]["message"]["content"])
    assert answer["shape"] in ("circle", "square")
    assert 1 <= answer["count"] <= 9


def test_other_video_fps_equals_transformers(start, engine, folder):
    """At 24 fps, all frames of this video have the same position in time."""
    with start(video_fps=24) as fast:
        ids, logprobs = our_logprobs(fast, "video")
    expected_ids, expected = transformers_logprobs(TransformersEngine(folder, video_fps=24), "video")

    assert ids == expected_ids
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-3)
    _, other = our_logprobs(engine, "video")
    assert logprobs[0] != pytest.approx(other[0], abs=1e-2)

    by_request = our_logprobs(engine, "video", mm_processor_kwargs={"fps": [24.0], "do_sample_frames": False})
    assert by_request == (ids, logprobs)


@pytest.mark.parametrize("size", PUBLISHED)
def test_dashinfer_decodes_the_text_model(tmp_path, size):
    assert unsupported(Qwen25VL().load_spec(write_published(tmp_path, size)).text) == ""
