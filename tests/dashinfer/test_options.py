"""Checks and translation of options before they reach the engine; no test here needs the engine."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders import DecodeRequest
from dashinfer_vlm_core.errors import ConfigError, InvalidParameter, UnsupportedParameter
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_core.protocol.sampling import Sampling
from dashinfer_vlm_dashinfer import worker
from dashinfer_vlm_dashinfer.decoder import _arrays
from dashinfer_vlm_dashinfer.environment import PROGRAM
from dashinfer_vlm_dashinfer.options import check_sampling, generate_config, stop_tokens
from dashinfer_vlm_dashinfer.plan import check_cache_salt, make_plan
from dashinfer_vlm_dashinfer.settings import DashInferOptions
from tests.plugins.oracle import visual


@pytest.fixture(scope="module")
def spec(tiny_checkpoint):
    return read_spec(tiny_checkpoint)


def options(spec, **sampling):
    request = DecodeRequest(
        id="",
        token_ids=np.arange(5),
        positions=np.tile(np.arange(5), (3, 1)),
        sampling=Sampling(max_tokens=7, **sampling),
    )
    return generate_config(request, spec)


def test_default_request_samples_full_distribution(spec):
    found = options(spec)
    assert (found["temperature"], found["top_k"], found["top_p"]) == (1.0, 0, 0.0)
    assert found["max_length"] == 12
    assert found["stop_words_ids"] == [[token] for token in sorted(spec.tokens.stop)]


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({"temperature": 0.0, "top_p": 0.5}, {"top_k": 1, "temperature": 1.0, "top_p": 0.0}),
        ({"temperature": 1e-6}, {"top_k": 1, "temperature": 1.0}),
        ({"top_k": 320}, {"top_k": 0}),
        ({"top_k": 319}, {"top_k": 319}),
        ({"top_k": 10**9}, {"top_k": 0}),
        ({"top_p": 0.9999995}, {"top_p": 0.0}),
        ({"top_p": 0.999}, {"top_p": 0.999}),
        ({"top_p": 1e-12}, {"top_p": 1e-6}),
        ({"seed": -1}, {"seed": 2**32 - 1}),
        ({"seed": 2**63}, {"seed": 0}),
        ({"logprobs": 0}, {"logprobs": True, "top_logprobs": 0}),
    ],
)
def test_values_are_translated_to_avoid_silent_changes(spec, asked, sent):
    found = options(spec, **asked)
    assert {name: found[name] for name in sent} == sent


def test_stop_tokens(spec):
    assert stop_tokens(Sampling(stop_token_ids=(7,)), spec) == {7, *spec.tokens.stop}
    assert stop_tokens(Sampling(stop_token_ids=(7,), ignore_eos=True), spec) == {7}


@pytest.mark.parametrize(
    ("asked", "kind", "param"),
    [
        ({"repetition_penalty": 2.01}, InvalidParameter, "repetition_penalty"),
        ({"repetition_penalty": 1e-30}, InvalidParameter, "repetition_penalty"),
        ({"logprobs": 11}, InvalidParameter, "top_logprobs"),
        ({"logprobs": 1, "presence_penalty": 1.0}, UnsupportedParameter, "logprobs"),
    ],
)
def test_unsupported_values_are_rejected(asked, kind, param):
    with pytest.raises(kind) as refusal:
        check_sampling(Sampling(**asked))
    assert refusal.value.param == param


def plan(folder, *, cuda, cpu_only=False, **config):
    return make_plan(read_spec(folder), EngineConfig(**config), cuda=cuda, cpu_only=cpu_only)


def test_cache_salts_are_rejected_with_prefix_cache(tiny_checkpoint):
    with pytest.raises(UnsupportedParameter, match="--no-prefix-cache") as caught:
        check_cache_salt("tenant", plan(tiny_checkpoint, cuda=1))
    assert caught.value.param == "cache_salt"
    check_cache_salt("", plan(tiny_checkpoint, cuda=1))
    check_cache_salt("tenant", plan(tiny_checkpoint, cuda=1, prefix_cache=False))
    check_cache_salt("tenant", plan(tiny_checkpoint, cuda=0))  # on a CPU, the engine has no prefix cache


def test_plan_for_cuda(tiny_checkpoint):
    one = plan(tiny_checkpoint, cuda=4)
    assert (one.compute_unit, one.max_batch_size, one.max_model_len, one.weight_format.dtype) == (
        "CUDA:0",
        32,
        2048,
        "float32",
    )
    two = plan(tiny_checkpoint, cuda=4, device="cuda:1", tensor_parallel=2, dtype="bfloat16", quantization="int8")
    assert (two.compute_unit, two.weight_format.split, two.weight_format.dtype, two.weight_format.quantization) == (
        "CUDA:1,2",
        True,
        "bfloat16",
        "int8",
    )


def test_plan_has_dashinfers_name_of_4_bits(tiny_checkpoint):
    assert plan(tiny_checkpoint, cuda=1, quantization="int4").weight_format.quantization == "uint4"


def test_cpu_plan_stays_within_kv_cache_memory(tiny_checkpoint):
    """A token of this model needs 2 layers * 2 * 2 heads * 16 * 4 bytes."""
    assert plan(tiny_checkpoint, cuda=0).max_batch_size == 32
    small = plan(tiny_checkpoint, cuda=0, kv_cache_mib=1, max_model_len=1000)
    assert (small.compute_unit, small.max_model_len, small.max_batch_size) == ("CPU:0", 1000, 2)
    tight = plan(tiny_checkpoint, cuda=4, device="cpu", kv_cache_mib=1)
    assert (tight.max_model_len, tight.max_batch_size) == (2048, 1)


@pytest.mark.parametrize(("device", "cuda"), [("auto", 1), ("cuda", 1), ("cuda", 0), ("cuda:1", 2)])
def test_cpu_only_environment_never_uses_gpu(tiny_checkpoint, device, cuda):
    with pytest.raises(ConfigError, match="run `dashinfer-vlm dashinfer install` for an environment") as refusal:
        plan(tiny_checkpoint, cuda=cuda, cpu_only=True, device=device)
    assert refusal.value.param == "device"


@pytest.mark.parametrize(("device", "cuda"), [("auto", 0), ("cpu", 0), ("cpu", 4)])
def test_cpu_only_environment_runs_on_cpu(tiny_checkpoint, device, cuda):
    assert plan(tiny_checkpoint, cuda=cuda, cpu_only=True, device=device).compute_unit == "CPU:0"


@pytest.mark.parametrize(
    ("config", "cuda", "param"),
    [
        ({"tensor_parallel": 2}, 0, "tensor_parallel"),
        ({"tensor_parallel": 2}, 1, "tensor_parallel"),
        ({"tensor_parallel": 3}, 4, "tensor_parallel"),
        ({"quantization": "int8"}, 0, "quantization"),
        ({"kv_cache_dtype": "int8"}, 0, "kv_cache_dtype"),
        ({"kv_cache_dtype": "int8"}, 1, "kv_cache_dtype"),
        ({"dtype": "bfloat16"}, 0, "dtype"),
        ({"device": "mps"}, 4, "device"),
        ({"device": "cuda:1"}, 1, "tensor_parallel"),
    ],
)
def test_options_unsupported_by_device_are_rejected(tiny_checkpoint, config, cuda, param):
    with pytest.raises(ConfigError) as refusal:
        plan(tiny_checkpoint, cuda=cuda, **config)
    assert refusal.value.param == param


def test_other_decoders_reject_tensor_parallel():
    DashInferOptions(tensor_parallel=1).check("torch")
    DashInferOptions(tensor_parallel=2).check("dashinfer")
    with pytest.raises(ConfigError, match="the decoder torch runs on one device") as refusal:
        DashInferOptions(tensor_parallel=2).check("torch")
    assert refusal.value.param == "tensor_parallel"


def test_frames_round_trip(socketpair):
    ours, theirs = socketpair
    arrays = [np.arange(6, dtype=np.int64).reshape(1, 6), np.zeros((0, 3), np.float32), np.ones((2, 3), np.float32)]
    ours.sendall(b"".join(worker.pack({"do": "start", "id": 1}, arrays)))
    head, found = worker.Connection(theirs).receive()
    assert head == {"do": "start", "id": 1}
    assert all(
        np.array_equal(one, other) and one.dtype == other.dtype for one, other in zip(arrays, found, strict=True)
    )
    assert all(array.flags.writeable for array in found)
    ours.close()
    with pytest.raises(EOFError):
        worker.Connection(theirs).receive()


@pytest.fixture
def socketpair():
    import socket

    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_absurd_frame_length_is_rejected():
    with pytest.raises(ValueError, match="a frame's head"):
        worker.head_length(b"\xff\xff\xff\xff")


def test_worker_scripts_do_not_import_project():
    for name in ("worker.py", "serialize.py", "torch_placeholder.py"):
        source = (PROGRAM.parent / name).read_text()
        assert not re.search(r"^\s*(from \.|import dashinfer_vlm|from dashinfer_vlm)", source, re.MULTILINE), name


def test_digest_of_a_video_depends_on_its_positions():
    """Two videos of which equal pairs of frames remain can have had these at different times."""
    request = visual(2, (3, 2, 2), 1, width=4)
    moved = request.positions.copy()
    moved[0, 6:14] += 1
    digests = [_arrays(given)[-1].tobytes() for given in (request, request, replace(request, positions=moved))]
    assert digests[0] == digests[1] != digests[2]
    assert all(len(digest) == 32 for digest in digests)
