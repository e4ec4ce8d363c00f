"""The cost of LoRA adapters: the time of a step whose sequences use none, one, or one adapter each.

    python -m benchmarks.lora [--model small|2b|demo|FOLDER] [--rank 16] [--rounds 20] [options of dashinfer-vlm serve]

Adapters with random weights for all linear layers of the text model. The variants alternate in each round; the ratios
are those of the minimum times.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import torch
from safetensors.torch import save_file

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.decoders import DecodeRequest, Sampling
from dashinfer_vlm_core.kernels.choice import KernelSelector
from dashinfer_vlm_core.models.lora import LoraWeights, read_lora, text_tensors
from dashinfer_vlm_core.models.spec import ModelSpec
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_torch.decoder import TorchDecoder
from dashinfer_vlm_torch.lora import TextLora
from dashinfer_vlm_torch.runner import ModelRunner
from dashinfer_vlm_torch.scheduler import Scheduler
from dashinfer_vlm_torch.sequence import ScheduledChunk, SequenceState

from .models import checkpoint

PROMPT_TOKENS = 256
LORAS = 8


def write_lora(folder: Path, spec: ModelSpec, rank: int) -> LoraWeights:
    """Write an adapter with random weights to `folder`, and read it."""
    tensors = {}
    for name, (outputs, inputs) in list(text_tensors(spec.text).items())[
        2:
    ]:  # all but the embedding table and the head
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs).bfloat16() / 64
        tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank).bfloat16() / 64
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return read_lora(folder.name, str(folder), spec)


def chunks(
    spec: ModelSpec,
    loras: Sequence[TextLora | None],
    runner: ModelRunner,
    *,
    prefill: bool,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Sequence[ScheduledChunk]:
    """Return the first step of sequences with these adapters, or the first one after their prompts."""
    source, count = random.Random("lora"), len(loras)
    scheduler = Scheduler(
        kv_tokens=count * 2 * prompt_tokens,
        max_batch_size=count,
        max_waiting=count,
        prefill_chunk=count * prompt_tokens,
    )
    for number, lora in enumerate(loras):
        request = DecodeRequest(
            id=str(number),
            token_ids=np.array([source.randrange(spec.vocab_size // 2) for _ in range(prompt_tokens)], np.int64),
            positions=np.tile(np.arange(prompt_tokens), (3, 1)),
            sampling=Sampling(max_tokens=8, ignore_eos=True, temperature=0),
        )
        scheduler.add(SequenceState(request, (), lora))
    first = scheduler.schedule().chunks
    if prefill:
        return first
    scheduler.update(first, runner.executor.run(lambda: runner.step(first)))
    return scheduler.schedule().chunks


async def measure(spec: ModelSpec, config: EngineConfig, rank: int, rounds: int) -> None:
    decoder = TorchDecoder(spec, config, KernelSelector(load_plugins().kernels.values(), config))
    await decoder.start()
    runner = decoder._worker._runner  # noqa: SLF001 - the step is not part of the interface
    with tempfile.TemporaryDirectory() as folder:
        files = [write_lora(Path(folder) / str(number), spec, rank) for number in range(LORAS)]
        loras = [runner.load_lora(file) for file in files]
    print(f"An adapter of rank {rank} has {files[0].num_bytes / 2**20:.1f} MiB.\n")
    print("| step | no adapter, ms | 1 of 8 sequences | one for all | one each |\n|---|---|---|---|---|")
    for name, count, prefill in (("decode, 1 sequence", 1, False), ("decode, 8 sequences", 8, False),
                                 ("prefill, 8 x 256 tokens", 8, True)):  # fmt: skip
        variants: list[list[TextLora | None]] = [
            [None] * count,
            [*[None] * (count - 1), loras[0]],
            [loras[0]] * count,
            list(loras[:count]),
        ]
        steps = [chunks(spec, variant, runner, prefill=prefill) for variant in variants]
        seconds: list[list[float]] = [[] for _ in variants]
        for _ in range(max(3, rounds // 10) if prefill else rounds):
            for step, times in zip(steps, seconds, strict=True):
                begin = time.perf_counter()
                runner.executor.run(lambda step=step: runner.step(step))
                times.append(time.perf_counter() - begin)
        base, *others = (min(times) for times in seconds)
        ratios = " | ".join(f"{other / base:.3f}" for other in others)
        print(f"| {name} | {1000 * base:.2f} | {ratios} |", flush=True)
    await decoder.close()


@click.command(cls=EngineCommand, help=__doc__, context_settings={"max_content_width": 100})
@click.option("--rank", default=16, show_default=True)
@click.option("--rounds", default=20, show_default=True)
def main(rank: int, rounds: int, config: EngineConfig) -> None:
    spec = load_plugins().load_spec(checkpoint(config.model))
    asyncio.run(measure(spec, config, rank, rounds))


if __name__ == "__main__":
    main()
