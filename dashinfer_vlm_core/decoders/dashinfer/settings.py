"""The options that DashInfer alone has."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from ...config import PluginOptions
from ...errors import ConfigError


class DashInferOptions(PluginOptions):
    title: ClassVar[str] = "DashInfer alone"

    tensor_parallel: int = Field(1, ge=1, le=64, description="CUDA devices that share the weights (DashInfer).")
    approximate_vision: bool = Field(
        False,
        description="Whether DashInfer answers about pictures on a CPU, where it ignores their rows and columns.",
    )
    dashinfer_python: Path | None = Field(
        None, description="Interpreter of an environment that has DashInfer; by default the one that was installed."
    )

    def check(self, decoder: str) -> None:
        """The others are about how DashInfer runs where it is chosen; this one is about what the model needs."""
        if decoder != "dashinfer" and self.tensor_parallel > 1:
            raise ConfigError(
                f"`tensor_parallel` {self.tensor_parallel}: the decoder {decoder} runs on one device. Leave it out, or"
                " take the decoder dashinfer.",
                param="tensor_parallel",
            )
