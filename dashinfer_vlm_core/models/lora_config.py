"""The configuration of a LoRA adapter, `adapter_config.json` of PEFT. This module does not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointError
from .json_fields import JsonFields, read_fields

UNSUPPORTED: Mapping[str, str] = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "fan_in_fan_out": "transposed weights",
    "lora_bias": "biases of the factors",
    "layer_replication": "replicated layers",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "factors of parameters",
    "alora_invocation_tokens": "aLoRA",
    "arrow_config": "Arrow",
    "use_bdlora": "BD-LoRA",
}
"""Fields of the configuration that must be null, false or empty, and what they enable."""

CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "orthogonal")
"""Values of `init_lora_weights` with which PEFT changes the base model's weights; the folder contains only the rest."""


class LoraConfig(NamedTuple):
    """The fields of the configuration that determine the scales, and the modules that were trained completely."""

    alpha: float
    rank: int
    alpha_pattern: Mapping[str, float]
    rank_pattern: Mapping[str, float]
    rank_stabilized: bool
    saved_modules: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str, rank: int) -> float:
        alpha = _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of the module's path, as PEFT does."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read_lora_config(file: Path) -> LoraConfig:
    """Read and check `adapter_config.json`.

    Raises:
        CheckpointError: it is missing or invalid, or requires an unsupported feature.
    """
    if not file.is_file():
        raise CheckpointError(f"{file} is missing. Is this a LoRA folder of PEFT?")
    fields = read_fields(file)
    _check_supported(fields)
    saved = fields.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(item, str) for item in saved):
        fields.fail("modules_to_save", f"must be a list of names, got {saved!r}", _COPY)
    return LoraConfig(
        alpha=fields.number("lora_alpha"),
        rank=int(fields.number("r")),
        alpha_pattern=_patterns(fields, "alpha_pattern"),
        rank_pattern=_patterns(fields, "rank_pattern"),
        rank_stabilized=bool(fields.get("use_rslora")),
        saved_modules=tuple(saved),
    )


def _patterns(fields: JsonFields, name: str) -> dict[str, float]:
    if not fields.get(name):
        return {}
    section = fields.section(name)
    try:
        for pattern in section.values:
            re.compile(pattern)
    except re.error as error:
        fields.fail(name, f"must be regular expressions, got {error.pattern!r}", _COPY)
    return {pattern: section.number(pattern) for pattern in section.values}


def _check_supported(fields: JsonFields) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        fields.fail("peft_type", f"is {kind!r}, but only 'LORA' is supported", _COPY)
    for name, feature in UNSUPPORTED.items():
        if fields.get(name):
            fields.fail(name, f"enables {feature}, which is not supported", _MERGE)
    if fields.get("bias") not in (None, "none"):
        fields.fail("bias", f"is {fields.get('bias')!r}, but only 'none' is supported", _MERGE)
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(CHANGES_BASE):
        fields.fail(
            "init_lora_weights",
            f"is {init!r}, which changed the base model's weights too",
            "Save the adapter with `path_initial_model_for_weight_conversion`, which converts it to plain LoRA.",
        )


_COPY = "Copy or download it again."
_MERGE = "Merge the adapter into a checkpoint with PEFT's `merge_and_unload`, and serve that."
