"""Arguments of vLLM's `LLM`: mapped to options, accepted without effect, or rejected with the option to use."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dashinfer_vlm_core import VLM, EngineConfig, SamplingParams, StructuredOutputsParams
from dashinfer_vlm_core.config import MediaLimits
from dashinfer_vlm_core.config.vllm_arguments import OF_THE_SERVER, REJECTED, RENAMED, WITHOUT_EFFECT
from dashinfer_vlm_core.errors import ConfigError, InvalidParameter, UnsupportedParameter
from dashinfer_vlm_core.offline.vllm_arguments import REJECTED_IN_CALLS, check_call_arguments, to_engine_options
from dashinfer_vlm_core.protocol import ChatRequest
from tests.cases import cases

MESSAGES = [{"role": "user", "content": "Hello"}]


@cases(
    ("arguments", "name", "value"),
    [
        ({"max_num_seqs": 4}, "max_batch_size", 4),
        ({"max_num_batched_tokens": 256}, "prefill_chunk", 256),
        ({"enable_prefix_caching": False}, "prefix_cache", False),
        ({"kv_cache_memory_bytes": 512 * 2**20}, "kv_cache_mib", 512),
        ({"mm_processor_cache_gb": 0.5}, "vision_cache_mib", 512),
        ({"dtype": "half"}, "dtype", "float16"),
        ({"dtype": "float"}, "dtype", "float32"),
        ({"dtype": torch.bfloat16}, "dtype", "bfloat16"),
        ({"dtype": "auto"}, "dtype", "auto"),
        (
            {"limit_mm_per_prompt": {"image": 2, "video": 1, "audio": 0}},
            "limit_mm_per_prompt",
            MediaLimits(image=2, video=1),
        ),
        (
            {"limit_mm_per_prompt": {"image": {"count": 3, "width": 512}, "video": 0}},
            "limit_mm_per_prompt",
            MediaLimits(image=3, video=0),
        ),
        ({"allowed_local_media_path": ""}, "allowed_local_media_path", None),
        ({"allowed_local_media_path": "/tmp"}, "allowed_local_media_path", Path("/tmp")),
        ({"quantization": None}, "quantization", "none"),
        ({"max_model_len": 1024}, "max_model_len", 1024),
        ({"max_num_seqs": None}, "max_batch_size", 32),
        ({"chat_template": "template.jinja"}, "chat_template", Path("template.jinja")),
    ],
)  # fmt: skip
def test_argument_becomes_option(arguments, name, value):
    config = EngineConfig(**to_engine_options(arguments))
    assert getattr(config, name) == value


@pytest.mark.parametrize("name", RENAMED)
def test_renamed_arguments_lead_to_options(name):
    assert RENAMED[name] in EngineConfig.model_fields
    with pytest.raises(ConfigError, match="vLLM's name") as caught:
        to_engine_options({name: 1, RENAMED[name]: 1})
    assert caught.value.param == name


@cases("name", REJECTED)
def test_neutral_values_are_accepted_and_others_rejected(name):
    neutral, next_step = REJECTED[name]
    for value in neutral:
        assert to_engine_options({name: value}) == {}
    with pytest.raises(ConfigError) as caught:
        to_engine_options({name: "something else"})
    assert caught.value.param == name
    assert f"`{name}`" in caught.value.message
    assert next_step in caught.value.message


@cases(
    ("name", "value", "next_step"),
    [
        ("gpu_memory_utilization", 0.5, "kv_cache_mib"),
        ("tensor_parallel_size", 2, "one server for each GPU"),
        ("tensor_parallel_size", True, "one server for each GPU"),
        ("runner", "draft", "Set `task`"),
        ("speculative_config", {"method": "eagle"}, "speculative_method"),
        ("enable_chunked_prefill", False, "prefill_chunk"),
        ("tokenizer", "other", "checkpoint"),
        ("quantization", "awq", "read from its files: remove it"),
    ],
)
def test_rejection_names_the_option_to_use(name, value, next_step):
    with pytest.raises(ConfigError, match=next_step):
        to_engine_options({name: value})


def test_tokenizer_of_the_model_is_accepted():
    assert to_engine_options({"model": "demo", "tokenizer": "demo"}) == {"model": "demo"}
    assert to_engine_options({"revision": "v1", "tokenizer_revision": "v1"}) == {"revision": "v1"}


def test_arguments_without_effect_are_logged_with_reason(caplog):
    with caplog.at_level(logging.WARNING):
        assert to_engine_options(dict.fromkeys(WITHOUT_EFFECT, True)) == {}
    (record,) = caplog.records
    for name, reason in WITHOUT_EFFECT.items():
        assert f"`{name}` ({reason})" in record.message


def test_tables_name_each_argument_once():
    names = [*REJECTED, *WITHOUT_EFFECT, *RENAMED, *OF_THE_SERVER]
    assert len(set(names)) == len(names)
    assert not set(names) & EngineConfig.model_fields.keys()


def test_invalid_value_is_named():
    for name, value in (("kv_cache_memory_bytes", "4 GB"), ("mm_processor_cache_gb", [])):
        with pytest.raises(ConfigError) as caught:
            to_engine_options({name: value})
        assert caught.value.param == name


def test_unknown_argument_is_rejected(tiny_checkpoint):
    for name, meant in (
        ("max_num_seq", "`max_num_seqs`"),
        ("max_model_length", "`max_model_len`"),
        ("tensor_paralel_size", "`tensor_parallel_size`"),
        ("mm_procesor_kwargs", "`mm_processor_kwargs`"),
        ("completely_different", "lists every option"),
    ):
        with pytest.raises(ConfigError, match=meant) as caught:
            VLM(tiny_checkpoint, **{name: 4})
        assert caught.value.param == name


@pytest.mark.slow
def test_arguments_of_model_cards_work(tiny_checkpoint):
    """Those of the cards of Qwen2.5-VL and Qwen3-VL, and of common scripts."""
    options = {
        "limit_mm_per_prompt": {"image": 10, "video": 10},
        "mm_encoder_tp_mode": "data",
        "enable_expert_parallel": False,
        "tensor_parallel_size": 1,
        "seed": 0,
        "trust_remote_code": True,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.9,
        "max_num_seqs": 5,
        "max_model_len": 2048,
        "mm_processor_kwargs": {"min_pixels": 28 * 28, "max_pixels": 1280 * 28 * 28},
    }
    with VLM(model=str(tiny_checkpoint), **options) as vlm:
        config = vlm.engine.config
        assert (config.max_batch_size, config.max_model_len) == (5, 2048)
        assert config.limit_mm_per_prompt == MediaLimits(image=10, video=10)
        assert vlm.generate("Hello", use_tqdm=False)[0].finished


def test_arguments_of_calls_are_accepted_or_rejected_with_next_step(tiny_checkpoint):
    for name, (neutral, next_step) in REJECTED_IN_CALLS.items():
        for value in neutral:
            check_call_arguments({name: value})
        with pytest.raises(UnsupportedParameter) as caught:
            check_call_arguments({name: "something else"})
        assert caught.value.param == name
        assert next_step in caught.value.message
    with VLM(tiny_checkpoint) as vlm:
        with pytest.raises(UnsupportedParameter, match="apply_chat_template"):
            vlm.generate([], tools=[{"type": "function"}])
        for call in (vlm.generate, vlm.chat):
            with pytest.raises(TypeError, match="'top_k'"):
                call([], top_k=3)
            assert call([], use_tqdm=False, tools=None) == []


def test_sampling_parameters_without_effect_are_accepted():
    neutral = {"best_of": 1, "min_p": 0.0, "skip_special_tokens": True, "detokenize": True, "prompt_logprobs": None}
    assert SamplingParams(max_tokens=3, **neutral) == SamplingParams(max_tokens=3)
    assert replace(SamplingParams(top_k=-1, stop_token_ids=[]), seed=3).seed == 3


@pytest.mark.parametrize(
    ("name", "value", "next_step"),
    [
        ("best_of", 2, "`n`"),
        ("guided_decoding", {"json": {}}, "structured_outputs"),
    ],
)
def test_sampling_parameter_of_vllm_is_rejected_with_next_step(name, value, next_step):
    with pytest.raises(UnsupportedParameter, match=next_step) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_unknown_sampling_parameter_is_a_type_error():
    with pytest.raises(TypeError, match="temp"):
        SamplingParams(temp=1)


def test_structured_outputs_become_the_field_of_a_request():
    neutral = {"disable_fallback": True, "grammar": None, "disable_any_whitespace": False}
    given = StructuredOutputsParams(choice=["a", "b"], **neutral)
    assert given == StructuredOutputsParams(choice=["a", "b"])
    request = ChatRequest.parse({"messages": MESSAGES, **SamplingParams(structured_outputs=given).fields()})
    assert request.output_constraint.choices == ("a", "b")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (StructuredOutputsParams(), "structured_outputs"),
        (StructuredOutputsParams(json={}, regex="a"), "structured_outputs.regex"),
        (StructuredOutputsParams(choice=[]), "structured_outputs.choice"),
        ({"choices": ["a"]}, "structured_outputs.choices"),
        ("a", "structured_outputs"),
    ],
)
def test_invalid_structured_outputs_are_named(given, param):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(structured_outputs=given)
    assert caught.value.param == param


def test_structured_output_without_support_is_rejected_with_next_step():
    with pytest.raises(UnsupportedParameter, match="JSON schema, `regex` or `choice`") as caught:
        StructuredOutputsParams(grammar='root ::= "a"')
    assert caught.value.param == "grammar"
