"""Videos and cached prefixes of Qwen3-VL, through an engine; what it shares with Qwen3.5 is tested in tests/models."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from dashinfer_vlm_core import VLM, EngineConfig, SamplingParams
from dashinfer_vlm_core.media import READERS
from dashinfer_vlm_core.media.decoder import MediaDecoder
from dashinfer_vlm_core.protocol import MediaPart
from dashinfer_vlm_qwen3_vl import Qwen3VL
from tests.conversations import as_openai, blurred_image, user
from tests.recorder import recorded_engine
from tests.samples import data_url, encode_video

from .oracle import Clip

TOKENS = 16


@pytest.fixture(scope="module", params=["dense", pytest.param("moe", marks=pytest.mark.slow)])
def folder(request):
    return request.getfixturevalue(request.param)


@pytest.mark.slow
def test_prefix_with_one_of_two_images_is_reused(folder):
    """The additions of the second image are prefilled after a cached prefix with those of the first."""
    engine, recorder = recorded_engine(folder)
    without, other_recorder = recorded_engine(folder, prefix_cache=False)
    image, other, cached = blurred_image(40, 190, 190), blurred_image(41, 190, 190), []
    with engine, without:
        for pair in ([image, image], [image, other], [other, image]):
            request = {"messages": as_openai([user(*pair, "Compare.")]), "temperature": 0, "max_tokens": 8}
            done = engine.chat(request)
            assert recorder.tokens[done.id] == other_recorder.tokens[without.chat(request).id]
            cached.append(done.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 44, 0]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"fps": 4.0}, {"num_frames": 5}])
def test_video_file_equals_transformers(dense, oracle, options):
    data = encode_video(23, fps=10, height=96, width=64)
    spec, part = Qwen3VL().load_spec(dense), MediaPart(kind="video", path="here", url="data:", **options)
    decoder = MediaDecoder(config=EngineConfig(), readers=READERS, policy=spec.video)
    video = decoder.decode(part, [data], lambda: None)
    indices = (
        oracle.videos.sample_frames(
            Clip([], 10.0, [22]).metadata, num_frames=options.get("num_frames"), fps=options.get("fps")
        )
        if "num_frames" not in options
        else np.linspace(0, 22, 5).round().astype(int)
    )
    assert video.times == tuple(index / 10 for index in indices.tolist())
    clip = Clip([Image.fromarray(frame) for frame in video.frames], 10.0, indices.tolist())
    ids, _ = oracle.generate([{"role": "user", "content": [{"type": "video", "video": clip}]}], TOKENS)
    engine, recorder = recorded_engine(dense)
    url = {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4"), **options}}
    with engine:
        done = engine.chat({"messages": [{"role": "user", "content": [url]}], "temperature": 0, "max_tokens": TOKENS})
    assert recorder.tokens[done.id] == ids


def test_frames_with_metadata_equal_transformers(dense, oracle):
    """As qwen-vl-utils returns them with `return_video_metadata`: the times are those of the original video."""
    frames, indices = [blurred_image(seed, 64, 96) for seed in range(50, 54)], [0, 3, 7, 10]
    messages = [{"role": "user", "content": [{"type": "video", "video": Clip(frames, 10.0, indices)}]}]
    ids, _ = oracle.generate(messages, TOKENS)
    metadata = {"fps": 10.0, "frames_indices": indices, "total_num_frames": 11, "video_backend": "decord"}
    prompt = {
        "prompt": oracle.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        "multi_modal_data": {"video": [(frames, metadata)]},
        "mm_processor_kwargs": {"do_sample_frames": False},
    }
    engine, _ = recorded_engine(dense)
    with engine:
        (output,) = VLM(engine=engine).generate(prompt, SamplingParams(temperature=0, max_tokens=TOKENS))
    assert list(output.prompt_token_ids) == oracle.inputs(messages)["input_ids"][0].tolist()
    assert list(output.outputs[0].token_ids) == ids
