"""Arguments of vLLM's `LLM` and of its server that do not exist here, or have another name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from ..protocol.fields import RejectedFields

RENAMED: Mapping[str, str] = {
    "enable_prefix_caching": "prefix_cache",
    "kv_cache_memory_bytes": "kv_cache_mib",
    "max_num_batched_tokens": "prefill_chunk",
    "max_num_seqs": "max_batch_size",
    "mm_processor_cache_gb": "vision_cache_mib",
}
"""Arguments that have another name here. None means the default, as in vLLM."""

_ONE_PROCESS = "A model runs on one device, in one process. Remove it, and start one server for each GPU."
_TASK = "Set `task` to embed or score; by default, it is found in the checkpoint's files."
_IN_REQUESTS = "Set the values in requests, which are `SamplingParams` in Python."
_FROM_CHECKPOINT = "It is read from the checkpoint. Remove it, or change the files of a copy of the checkpoint."

REJECTED: RejectedFields = {
    "compilation_config": ((0, {}), "Nothing is compiled with torch.compile. Remove it."),
    "config_format": (("auto", "hf"), _FROM_CHECKPOINT),
    "convert": (("auto", "none"), _TASK),
    "cpu_offload_gb": ((0, 0.0), "Weights stay on one device. Use `quantization` to reduce their size."),
    "data_parallel_size": ((1,), _ONE_PROCESS),
    "decode_context_parallel_size": ((1,), _ONE_PROCESS),
    "distributed_executor_backend": (("uni", "mp"), _ONE_PROCESS),
    "download_dir": ((), "Models are in the cache of Hugging Face. Set its variable HF_HOME."),
    "enable_chunked_prefill": (
        (True,),
        "Prompts are always computed in chunks. Set `prefill_chunk`, the size of a chunk in tokens.",
    ),
    "enable_sleep_mode": ((False,), "Stop the server, or use `close`, to free the memory."),
    "generation_config": (("auto", "vllm"), _IN_REQUESTS),
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
    "override_generation_config": (({},), _IN_REQUESTS),
    "pipeline_parallel_size": ((1,), _ONE_PROCESS),
    "pooler_config": ((), _TASK),
    "rope_scaling": (({},), _FROM_CHECKPOINT),
    "rope_theta": ((), _FROM_CHECKPOINT),
    "runner": (("auto", "generate", "pooling"), _TASK),
    "skip_tokenizer_init": ((False,), "The tokenizer is always used. Remove it."),
    "speculative_config": (
        ({},),
        "Set `speculative_model` to a draft model or EAGLE-3 head. `speculative_method` none disables speculation.",
    ),
    "tensor_parallel_size": (
        (1,),
        "A model runs on one device: start one server for each GPU. Only the decoder DashInfer has `tensor_parallel`.",
    ),
    "tokenizer": ((), _FROM_CHECKPOINT),
    "tokenizer_mode": (("auto", "hf"), _FROM_CHECKPOINT),
    "tokenizer_revision": ((), _FROM_CHECKPOINT),
}
"""Arguments that cannot be mapped, unless they have a neutral value."""

WITHOUT_EFFECT: Mapping[str, str] = {
    "async_scheduling": "steps are scheduled ahead on CUDA, with the same result",
    "block_size": "the KV cache has no blocks to configure",
    "disable_custom_all_reduce": "there is one device",
    "disable_log_stats": "the statistics are in `/metrics`, and in `vlm.engine.stats()`",
    "disable_mm_preprocessor_cache": "`vision_cache_mib` is the size of the cache of visual tokens",
    "enable_expert_parallel": "there is one device",
    "enable_lora": "adapters are loaded on first use, or at startup by `lora`",
    "enforce_eager": "`cuda_graphs` enables and disables CUDA graphs",
    "interleave_mm_strings": "placeholders are always where the prompt has them",
    "max_lora_rank": "memory is not reserved for adapters",
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

OF_THE_SERVER: Mapping[str, str] = {
    "enable_auto_tool_choice": "Remove it: requests with `tools` need no option.",
    "lora_modules": "It is `lora` here, once for each adapter.",
    "media_io_kwargs": "Set `video_fps` and `video_max_frames`, or send it in requests.",
    "mm_processor_kwargs": "Set `min_pixels`, `max_pixels` and `video_fps`, or send it in requests.",
    "reasoning_parser": "Remove it: the reasoning of models that reason is recognized.",
    "seed": "Send it in requests.",
    "tool_call_parser": "Remove it: tool calls have the format of Qwen's models.",
}
"""What to use instead of arguments of vLLM's server that its `LLM` does not have, or that `VLM` has too."""


def option_hint(name: str, known: Iterable[str]) -> str:
    """Return what to use instead of an unknown option: of vLLM, or the closest of those that are known; empty if there
    is none."""
    close = difflib.get_close_matches(name, known, n=1)
    return vllm_hint(name.replace("-", "_")) or (f"Did you mean {close[0]!r}?" if close else "")


def vllm_hint(name: str) -> str:
    """Return what to use instead of an argument of vLLM's server; empty if it has none of this name."""
    if name in RENAMED:
        return f"It is `{RENAMED[name]}` here."
    if name in REJECTED:
        return REJECTED[name][1]
    if name in WITHOUT_EFFECT:
        return f"Remove it: {WITHOUT_EFFECT[name]}."
    return OF_THE_SERVER.get(name, "")
