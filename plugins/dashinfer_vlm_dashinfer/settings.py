"""DashInfer's own options."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from dashinfer_vlm_core.config import PluginOptions
from dashinfer_vlm_core.errors import ConfigError


class DashInferOptions(PluginOptions):
    title: ClassVar[str] = "DashInfer only"

    tensor_parallel: int = Field(1, ge=1, le=64)
    """Number of CUDA devices to split the weights across."""

    dashinfer_python: Path | None = None
    """Python interpreter of DashInfer's environment; defaults to the one that `dashinfer install` created."""

    def check(self, decoder: str) -> None:
        """Check `tensor_parallel`, which the model may require; the other options have no effect on other decoders."""
        if decoder != "dashinfer" and self.tensor_parallel > 1:
            raise ConfigError(
                f"`tensor_parallel` {self.tensor_parallel}: the decoder {decoder} runs on one device. Remove it, or"
                " use the decoder dashinfer.",
                param="tensor_parallel",
            )
