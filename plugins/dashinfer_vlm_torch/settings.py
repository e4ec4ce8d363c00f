"""The PyTorch decoder's own options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from dashinfer_vlm_core.config import PluginOptions
from dashinfer_vlm_core.decoders import DRAFT_MODEL, GUIDED_DECODING, LORA, POOLING, PREFIX_CACHE
from dashinfer_vlm_core.errors import ConfigError

SUPPORTED_PARAMS = frozenset((
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "no_repeat_ngram_size", "no_repeat_ngram_window", "no_repeat_ngram_whitelist", "logit_bias",
    "stop_token_ids", "ignore_eos", "logprobs", DRAFT_MODEL, GUIDED_DECODING, LORA, POOLING,
    PREFIX_CACHE,
))  # fmt: skip
"""What the decoder implements of a request; see `sampler.py`, and `kernel_sampler.py` for rows without `top_p`."""


class TorchOptions(PluginOptions):
    title: ClassVar[str] = "PyTorch decoder only"

    speculative_method: Literal["auto", "ngram", "none"] = "auto"
    """How several tokens of a completion are computed per step, with the same result: `ngram` proposes repetitions of
    earlier text, and text that the response format prescribes; `auto` also what the checkpoint's head for multi-token
    prediction (MTP), or `speculative_model`, predicts; `none` computes one per step."""

    @property
    def uses_mtp(self) -> bool:
        return self.speculative_method == "auto"

    def check(self, decoder: str) -> None:
        if decoder != "torch" and self.speculative_method == "ngram":
            raise ConfigError(
                f"`speculative_method` {self.speculative_method}: the decoder {decoder} does not support it. Remove"
                " it, or use the decoder torch.",
                param="speculative_method",
            )

    def check_combination(self, options: Mapping[str, Any]) -> None:
        if options["speculative_model"] is not None and self.speculative_method != "auto":
            raise ConfigError(
                f"`speculative_model` is not used with `speculative_method` {self.speculative_method}. Remove one of"
                " them.",
                param="speculative_model",
            )
