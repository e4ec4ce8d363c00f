"""Arguments of vLLM's `LLM` -> options of `EngineConfig`, so that scripts for vLLM run, or report what to change."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..config import MIB, EngineConfig
from ..errors import ConfigError
from ..plugins import load_plugins
from ..protocol.fields import RejectedFields, reject_fields, rejection

logger: logging.Logger = logging.getLogger(__name__)

RENAMED: Mapping[str, str] = {
    "enable_prefix_caching": "prefix_cache",
    "kv_cache_memory_bytes": "kv_cache_mib",
    "max_num_batched_tokens": "prefill_chunk",
    "max_num_seqs": "max_batch_size",
    "mm_processor_cache_gb": "vision_cache_mib",
}
"""Arguments that have another name here. None means the default, as in vLLM."""

_ONE_PROCESS = "A model runs on one device, in one process. Remove it, and start one server for each GPU."
_GENERATES = "The models generate text. Use another package for embeddings, scores and rewards."
_FROM_CHECKPOINT = "It is read from the checkpoint. Remove it, or change the files of a copy of the checkpoint."


REJECTED: RejectedFields = {
    "compilation_config": ((0, {}), "Nothing is compiled with torch.compile. Remove it."),
    "config_format": (("auto", "hf"), _FROM_CHECKPOINT),
    "convert": (("auto", "none"), _GENERATES),
    "cpu_offload_gb": ((0, 0.0), "Weights stay on one device. Use `quantization` to reduce their size."),
    "data_parallel_size": ((1,), _ONE_PROCESS),
    "decode_context_parallel_size": ((1,), _ONE_PROCESS),
    "distributed_executor_backend": (("uni", "mp"), _ONE_PROCESS),
    "download_dir": ((), "Models are in the cache of Hugging Face. Set its variable HF_HOME."),
    "enable_chunked_prefill": (
        (True,),
        "Prompts are always computed in chunks. Set `prefill_chunk`, the size of a chunk in tokens.",
    ),
    "enable_sleep_mode": ((False,), "Use `close` to free the memory."),
    "generation_config": (("auto", "vllm"), "Set the values in `SamplingParams`."),
    "gpu_memory_utilization": (
        (0.9,),
        "Memory is not reserved in advance: the KV cache grows on demand. Set its maximum size, `kv_cache_mib`.",
    ),
    "hf_config_path": ((), _FROM_CHECKPOINT),
    "hf_overrides": (({},), _FROM_CHECKPOINT),
    "hf_token": ((False,), "Set the variable HF_TOKEN."),
    "load_format": (("auto", "safetensors"), "Weights are loaded from safetensors files. Remove it."),
    "logits_processors": (([],), "Use a response format, or `logit_bias`."),
    "max_logprobs": (tuple(range(21)), "At most 20 log probabilities per token are available. Remove it."),
    "num_gpu_blocks_override": ((), "Set the size of the KV cache, `kv_cache_mib`."),
    "override_generation_config": (({},), "Set the values in `SamplingParams`."),
    "pipeline_parallel_size": ((1,), _ONE_PROCESS),
    "pooler_config": ((), _GENERATES),
    "rope_scaling": (({},), _FROM_CHECKPOINT),
    "rope_theta": ((), _FROM_CHECKPOINT),
    "runner": (("auto", "generate"), _GENERATES),
    "skip_tokenizer_init": ((False,), "The tokenizer is always used. Remove it."),
    "speculative_config": (
        ({},),
        "Set `speculative_method`: `ngram` (the default) needs no other option, and `none` disables it.",
    ),
    "task": (("auto", "generate"), _GENERATES),
    "tensor_parallel_size": ((1,), _ONE_PROCESS),
    "tokenizer": ((), _FROM_CHECKPOINT),
    "tokenizer_mode": (("auto", "hf"), _FROM_CHECKPOINT),
    "tokenizer_revision": ((), _FROM_CHECKPOINT),
    "video_pruning_rate": ((0, 0.0), "Visual tokens are not pruned. Use `max_pixels` or `fps`."),
}
"""Arguments that cannot be mapped, unless they have a neutral value."""

_RENDERED = "Render the prompt with `get_tokenizer().apply_chat_template`, and use `generate`."

REJECTED_IN_CALLS: RejectedFields = {
    "add_generation_prompt": ((True,), _RENDERED),
    "chat_template": ((), "Set `chat_template` of VLM, or use `chat_template_kwargs`."),
    "chat_template_content_format": (("auto", "openai"), _RENDERED),
    "continue_final_message": ((False,), _RENDERED),
    "priority": ((0,), "Requests are served in their order. Remove it."),
    "tokenization_kwargs": (({},), "Prompts are never truncated. Remove it."),
    "tools": (([],), _RENDERED),
}
"""Arguments of vLLM's `generate` and `chat` that are accepted only with a neutral value."""

WITHOUT_EFFECT: Mapping[str, str] = {
    "async_scheduling": "steps are scheduled ahead on CUDA, with the same result",
    "block_size": "the KV cache has no blocks to configure",
    "disable_custom_all_reduce": "there is one device",
    "disable_log_stats": "the statistics are in `vlm.engine.stats()`",
    "disable_mm_preprocessor_cache": "`vision_cache_mib=0` disables the cache of visual tokens",
    "enable_expert_parallel": "there is one device",
    "enforce_eager": "`cuda_graphs=False` disables CUDA graphs",
    "interleave_mm_strings": "placeholders are always where the prompt has them",
    "max_loras": "memory is not reserved for adapters; `limits` has the maximum number",
    "max_seq_len_to_capture": "CUDA graphs are recorded for every context length",
    "mm_encoder_tp_mode": "there is one device",
    "mm_processor_cache_type": "there is one process",
    "skip_mm_profiling": "memory is not profiled",
    "swap_space": "the KV cache is not swapped",
    "trust_remote_code": "code of checkpoints is never executed",
    "use_v2_block_manager": "the KV cache has no blocks to configure",
}
"""Arguments that are accepted with any value, because they cannot change a result here; with the reason."""

_OWN = ("engine", "media_io_kwargs", "mm_processor_kwargs", "seed")
"""Arguments of `VLM` that are not options of an engine."""

_NONE_IS_DEFAULT = EngineConfig.model_fields.keys() - {"allowed_local_media_path"}  # None allows no folder
_DTYPES = {"half": "float16", "float": "float32"}
_STORED_FORMATS = frozenset(
    {"awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "gptq_marlin", "modelopt", "torchao"}
)
"""Values of vLLM's `quantization` that name the format of a checkpoint."""


def to_engine_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return `arguments` as options of `EngineConfig`. Those that vLLM does not have are returned unchanged.

    Arguments without effect are logged once with the reason.

    Raises:
        ConfigError: an argument is misspelled, cannot be mapped, is given under two names, or has an invalid value.
    """
    options: dict[str, Any] = {}
    ignored = []
    _check_spelling(arguments)
    for name, value in arguments.items():
        if name in WITHOUT_EFFECT:
            ignored.append(f"`{name}` ({WITHOUT_EFFECT[name]})")
        elif name in REJECTED:
            _check_rejected(name, value, arguments)
        else:
            _add(options, name, value, arguments)
    if ignored:
        logger.warning("These arguments of vLLM have no effect here: %s.", ", ".join(ignored))
    return options


def _check_spelling(arguments: Iterable[str]) -> None:
    known = {*EngineConfig.model_fields, *load_plugins().options, *RENAMED, *REJECTED, *WITHOUT_EFFECT, *_OWN}
    for name in arguments:
        if name not in known and (close := difflib.get_close_matches(name, sorted(known), n=1)):
            raise ConfigError(f"`{name}` is not an argument of VLM. Did you mean `{close[0]}`?", param=name)


def _add(options: dict[str, Any], name: str, value: Any, arguments: Mapping[str, Any]) -> None:
    ours = RENAMED.get(name, name)
    if ours != name and ours in arguments:
        raise ConfigError(f"`{name}` is vLLM's name of `{ours}`. Pass one of them.", param=name)
    if value is None and ours in _NONE_IS_DEFAULT:
        return
    try:
        options[ours] = _CONVERTERS[name](value) if name in _CONVERTERS else value
    except (TypeError, ValueError):
        raise ConfigError(f"`{name}` has an invalid value, got {value!r}.", param=name) from None


def check_call_arguments(arguments: Mapping[str, Any]) -> None:
    """Check arguments of vLLM's `generate` or `chat` that do not exist here.

    Raises:
        UnsupportedParameter: the value of an argument would change something.
        TypeError: vLLM does not have the argument either.
    """
    if unknown := arguments.keys() - REJECTED_IN_CALLS.keys():
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    reject_fields(arguments, REJECTED_IN_CALLS)


def _check_rejected(name: str, value: object, arguments: Mapping[str, Any]) -> None:
    same_as = {"tokenizer": "model", "tokenizer_revision": "revision"}.get(name)
    if same_as and str(value) == str(arguments.get(same_as)):
        return
    if reason := rejection(name, value, REJECTED):
        raise ConfigError(f"`{name}` {reason}", param=name)


def _dtype(value: object) -> str:
    """Convert vLLM's names, and torch.dtype, which prints as `torch.float16`."""
    name = str(value).removeprefix("torch.")
    return _DTYPES.get(name, name)


def _quantization(value: object) -> object:
    if value in _STORED_FORMATS:
        raise ConfigError(
            f"`quantization` of vLLM is not available here, got {value!r}. The format of a quantized checkpoint is read"
            " from its files: remove it. `int8` and `int4` quantize weights while they are loaded.",
            param="quantization",
        )
    return value


def _limits(value: object) -> object:
    """Convert `{"image": 4, "video": {"count": 1, "num_frames": 32}, "audio": 0}`; the other values only reserve
    memory in vLLM."""
    if not isinstance(value, Mapping):
        return value
    counts = {kind: limit.get("count", 999) if isinstance(limit, Mapping) else limit for kind, limit in value.items()}
    return {kind: count for kind, count in counts.items() if kind in ("image", "video") or count != 0}


_CONVERTERS: Mapping[str, Callable[[Any], object]] = {
    "allowed_local_media_path": lambda value: value or None,
    "dtype": _dtype,
    "kv_cache_memory_bytes": lambda value: int(value) // MIB,
    "limit_mm_per_prompt": _limits,
    "mm_processor_cache_gb": lambda value: int(float(value) * 1024),
    "quantization": _quantization,
}
