"""Arguments of vLLM's `LLM` -> options of `EngineConfig`, so that scripts for vLLM run, or report what to change."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..config import MIB, EngineConfig
from ..config.vllm_arguments import REJECTED, RENAMED, WITHOUT_EFFECT
from ..errors import ConfigError
from ..plugins import load_plugins
from ..protocol.fields import RejectedFields, reject_fields, rejection

logger: logging.Logger = logging.getLogger(__name__)

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
    return {kind: count for kind, count in counts.items() if kind in ("image", "video", "document") or count != 0}


_CONVERTERS: Mapping[str, Callable[[Any], object]] = {
    "allowed_local_media_path": lambda value: value or None,
    "dtype": _dtype,
    "kv_cache_memory_bytes": lambda value: int(value) // MIB,
    "limit_mm_per_prompt": _limits,
    "mm_processor_cache_gb": lambda value: int(float(value) * 1024),
    "quantization": _quantization,
}
