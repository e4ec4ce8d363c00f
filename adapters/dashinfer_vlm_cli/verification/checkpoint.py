"""A checkpoint with the parts of an engine that are verified: vision encoder and decoders."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders import Decoder
from dashinfer_vlm_core.kernels import KernelSelector
from dashinfer_vlm_core.models.interface import VisionEncoder
from dashinfer_vlm_core.plugins import Registry


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder, the device it runs on, and the registry with its family and the decoders."""

    registry: Registry
    device: str
    folder: Path

    @property
    def is_on_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    def config(self, dtype: str, *, decoder: str = "torch", **options: Any) -> EngineConfig:
        """Return the configuration of an engine; models that DashInfer converts are deleted with the checkpoint."""
        if decoder != "torch":
            cache = options["cache_dir"] = self.folder / "cache"
            if not cache.exists():
                cache.mkdir(mode=0o700)
                for environment in EngineConfig().cache_folder.glob("dashinfer-*-cp*"):
                    (cache / environment.name).symlink_to(environment)
        return EngineConfig(model=str(self.folder), device=self.device, dtype=dtype, decoder=decoder, **options)

    def load_encoder(self, config: EngineConfig) -> VisionEncoder:
        kernels = KernelSelector(self.registry.kernels.values(), config)
        spec = self.registry.load_spec(self.folder)
        return self.registry.family_of(self.folder).load_vision_encoder(spec, config, kernels)

    def other_decoders(self) -> dict[str, str]:
        """Return the decoders besides the PyTorch decoder, and why they cannot run; empty if they can."""
        reasons, spec = {}, self.registry.load_spec(self.folder)
        for name in self.registry.decoders.keys() - {"torch"}:
            support = self.registry.decoder(name).check_support(spec, self.config("auto", decoder=name))
            reasons[name] = "" if support.score else support.reason
        return reasons if self.is_on_cuda else dict.fromkeys(reasons, "it is verified on CUDA only")

    @asynccontextmanager
    async def decoding(self, config: EngineConfig) -> AsyncIterator[Decoder]:
        """Run the decoder of `config`."""
        kernels = KernelSelector(self.registry.kernels.values(), config)
        decoder = self.registry.decoder(config.decoder).create(self.registry.load_spec(self.folder), config, kernels)
        await decoder.start()
        try:
            yield decoder
        finally:
            await decoder.close()
