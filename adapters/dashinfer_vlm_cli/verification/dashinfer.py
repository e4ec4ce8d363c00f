"""DashInfer on CUDA, with the positions of images and videos: whether it can run, and greedy tokens = transformers'."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders import Decoder, DecodeRequest, Sampling, Token
from dashinfer_vlm_core.decoders.dashinfer.environment import private_folder
from dashinfer_vlm_core.kernels import KernelSelector
from dashinfer_vlm_core.plugins import Registry

from .checks import COMPLETION, CheckResult, complete_all, ids
from .prompts import PromptBuilder, TinyPrompt
from .reference import Reference
from .tiny_models import write_tiny_model

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
"""The families that DashInfer supports."""
GREEDY = Sampling(temperature=0, max_tokens=COMPLETION, ignore_eos=True)
ON_CPU = "it is verified on CUDA only: on a CPU, it ignores the rows and columns of images"


class DashInferCheck:
    """Compares DashInfer with transformers, on a tiny model in float32.

    Args:
        registry: has the family, and the decoder `dashinfer` if it can run.
        device: as torch names it.
        family: one of `FAMILIES`.
        folder: an existing one, for the model and its conversion.
    """

    def __init__(self, registry: Registry, *, device: str, family: str, folder: Path) -> None:
        self._registry = registry
        self._device = device
        self._family = family
        self._model = folder / f"dashinfer-{family}"
        self._cache = dashinfer_cache(folder)
        self._model.mkdir()
        write_tiny_model(family, self._model)

    def skip_reason(self) -> str:
        """Return why DashInfer cannot run on the device; empty if it can."""
        factory = self._registry.decoders.get("dashinfer")
        if factory is None:
            return "the decoder is not registered"
        support = factory.check_support(self._registry.load_spec(self._model), self._config("dashinfer"))
        return "" if support.score else support.reason

    def run(self) -> CheckResult:
        """Complete a batch; on a CPU, only its texts, since DashInfer rejects images there."""
        prompts = [prompt for prompt in PromptBuilder(self._registry, self._model).build().batch if self._runs(prompt)]
        completions = [ids(tokens) for tokens in self._complete(prompts)]
        exact = Reference(self._model, device=self._device, dtype=torch.float32)
        wrong = [
            prompt.name
            for prompt, tokens in zip(prompts, completions, strict=True)
            if tokens != exact.greedy(prompt, COMPLETION)
        ]
        return CheckResult(
            name=f"{self._family} float32: DashInfer, greedy tokens of {len(prompts)} at once",
            passed=not wrong,
            figure=f"other tokens: {', '.join(wrong)}" if wrong else f"all {COMPLETION * len(prompts)} equal",
            criterion="all equal",
        )

    def _runs(self, prompt: TinyPrompt) -> bool:
        return torch.device(self._device).type == "cuda" or not prompt.items

    def _complete(self, prompts: Sequence[TinyPrompt]) -> list[list[Token]]:
        config = self._config("torch")
        spec = self._registry.load_spec(self._model)
        kernels = KernelSelector(self._registry.kernels.values(), config)
        encoder = self._registry.family_of(self._model).load_vision_encoder(spec, config, kernels)
        requests = [prompt.request(encoder.encode(prompt.items) if prompt.items else [], GREEDY) for prompt in prompts]
        decoder = self._registry.decoder("dashinfer").create(spec, self._config("dashinfer"), kernels)
        return asyncio.run(_decode(decoder, requests))

    def _config(self, decoder: str) -> EngineConfig:
        return EngineConfig(
            model=str(self._model),
            device=self._device,
            dtype="float32",
            decoder=decoder,
            max_model_len=1024,
            cache_dir=self._cache,
        )


def dashinfer_cache(folder: Path) -> Path:
    """Return a cache folder in `folder` for converted models, with a link to the installed environment."""
    cache, installed = folder / "dashinfer-cache", private_folder(EngineConfig())
    if not cache.exists():
        cache.mkdir(mode=0o700)
        if installed.exists():
            (cache / installed.name).symlink_to(installed)
    return cache


async def _decode(decoder: Decoder, requests: Sequence[DecodeRequest]) -> list[list[Token]]:
    await decoder.start()
    try:
        return await complete_all(decoder, requests)
    finally:
        await decoder.close()
