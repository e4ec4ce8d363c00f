"""The PyTorch decoder's own options."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dashinfer_vlm_core.config import PluginOptions
from dashinfer_vlm_core.errors import ConfigError


class TorchOptions(PluginOptions):
    title: ClassVar[str] = "PyTorch decoder only"

    speculative_method: Literal["ngram", "none"] = Field(
        "ngram",
        description="How several tokens of a completion are computed per step, with the same result: `ngram` proposes"
        " repetitions of earlier text, and text that the response format prescribes; `none` computes one per step.",
    )

    async_scheduling: bool | None = Field(
        None,
        description="Launch the next decode step before the tokens of the last one are read, with the same result. By"
        " default, on CUDA only; on a CPU it delays tokens by a step.",
    )

    def check(self, decoder: str) -> None:
        if decoder != "torch" and "speculative_method" in self.model_fields_set and self.speculative_method != "none":
            raise ConfigError(
                f"`speculative_method` {self.speculative_method}: the decoder {decoder} does not support it. Remove"
                " it, or use the decoder torch.",
                param="speculative_method",
            )
        if decoder != "torch" and self.async_scheduling:
            raise ConfigError(
                f"`async_scheduling` true: the decoder {decoder} does not support it. Remove it, or use the decoder"
                " torch.",
                param="async_scheduling",
            )
