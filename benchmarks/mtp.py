"""The time of completions with the head for multi-token prediction, by the share of its drafts that is accepted.

    python -m benchmarks.mtp [--model qwen3.5-0.8b|FOLDER] [--rounds 3] [any option of dashinfer-vlm serve]

Random weights predict nothing. Therefore a grammar leaves the model, and its head, one choice per token, and drafts are
replaced by wrong tokens at random. Everything is computed as with trained weights, with all logits where these would
need the argmax only.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.decoders import DecodeRequest
from dashinfer_vlm_core.models.files import INDEX, SINGLE, tensor_names
from dashinfer_vlm_core.models.spec import ModelSpec
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_torch.decoder import TorchDecoder
from dashinfer_vlm_torch.drafter import Drafted, Drafter, HiddenStates
from dashinfer_vlm_torch.kv_cache import KVCache
from dashinfer_vlm_torch.sequence import ScheduledChunk, SequenceState

from .checkpoint_files import linked_copy, write_json
from .models import checkpoint
from .speculation import COPIED, ScriptedMatcher, prompt, request, started, timed

RATES = (0.5, 0.7, 0.9)
USERS = (1, 8)
HEAD = "mtp.safetensors"


class SyntheticDrafter:
    """Replaces drafted tokens by wrong ones, so that each is accepted with probability `rate`; a `Drafter`."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.rate: float = 1.0
        self._drafter = drafter
        self._vocab_size = vocab_size
        self.reads: HiddenStates = drafter.reads
        self.caches: Sequence[KVCache] = drafter.caches
        self._random = random.Random("mtp")

    def draft(
        self, chunks: Sequence[ScheduledChunk], hidden: Tensor | None, counts: Mapping[SequenceState, int]
    ) -> Drafted:
        drafted = self._drafter.draft(chunks, hidden, counts)
        tokens = {sequence: tuple(map(self._maybe_wrong, tokens)) for sequence, tokens in drafted.tokens.items()}
        return drafted._replace(tokens=tokens)

    def _maybe_wrong(self, token: int) -> int:
        return token if self._random.random() < self.rate else (token + 1) % self._vocab_size


def with_head(folder: Path) -> Path:
    """Return a checkpoint of Qwen3.5 in one file with a random head; one that has a head is returned itself."""
    if load_plugins().load_spec(folder).text.mtp_layer:
        return folder
    return linked_copy(folder, folder.with_name(f"{folder.name}-mtp"), _add_head)


def _add_head(folder: Path) -> None:
    save_file(random_head(folder / SINGLE), folder / HEAD, {"format": "pt"})
    files = {name: file for file in (SINGLE, HEAD) for name in tensor_names(folder / file)}
    write_json(folder / INDEX, {"metadata": {}, "weight_map": files})


def random_head(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a head, whose layer is a copy of one with attention."""
    query = "self_attn.q_proj.weight"
    with safe_open(file, "pt") as opened:
        layer = next(name for name in opened.keys() if name.endswith(query)).removesuffix(query)  # noqa: SIM118
        names = [name for name in opened.keys() if name.startswith(layer)]  # noqa: SIM118
        head: dict[str, Tensor] = {name.replace(layer, "mtp.layers.0."): opened.get_tensor(name) for name in names}
    norm = torch.zeros_like(head["mtp.layers.0.input_layernorm.weight"])
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        head[f"mtp.{name}.weight"] = norm.clone()
    head["mtp.fc.weight"] = torch.randn(len(norm), 2 * len(norm)).mul_(0.02).to(norm.dtype)
    return head


def scripted(source: random.Random, spec: ModelSpec) -> DecodeRequest:
    """Random text, in which no n-gram repeats."""
    script = [source.randrange(spec.vocab_size // 2) for _ in range(COPIED)]
    return request(prompt(source, spec), ScriptedMatcher(script, spec.vocab_size, []))


async def compare(config: EngineConfig, spec: ModelSpec, rounds: int) -> None:
    async with started(config, spec, "none", "auto") as decoders:
        runner = decoders["auto"]._worker._runner  # noqa: SLF001 - no option replaces the drafter
        drafter = SyntheticDrafter(runner._drafter, spec.vocab_size)  # noqa: SLF001
        runner._drafter = drafter  # noqa: SLF001
        print("| accepted | users | none, s | auto / none | accepted / drafted | steps |\n|---|---|---|---|---|---|")
        for users in USERS:
            for drafter.rate in RATES:
                await report(decoders, spec, drafter.rate, users, rounds)


async def report(decoders: Mapping[str, TorchDecoder], spec: ModelSpec, rate: float, users: int, rounds: int) -> None:
    source = random.Random("mtp")
    ratios, baseline = list[float](), list[float]()
    before = {method: decoder.snapshot() for method, decoder in decoders.items()}
    for _ in range(rounds):
        requests = [scripted(source, spec) for _ in range(users)]
        seconds = {method: (await timed(decoder, requests))[0] for method, decoder in decoders.items()}
        ratios.append(seconds["auto"] / seconds["none"])
        baseline.append(seconds["none"])
    after = {method: decoder.snapshot() for method, decoder in decoders.items()}
    steps = {method: after[method].steps - before[method].steps for method in decoders}
    accepted = after["auto"].accepted_tokens - before["auto"].accepted_tokens
    drafted = after["auto"].draft_tokens - before["auto"].draft_tokens
    print(
        f"| {rate} | {users} | {statistics.median(baseline):.2f} | {statistics.median(ratios):.3f}"
        f" ({min(ratios):.3f} to {max(ratios):.3f}) | {accepted} / {drafted} | {steps['auto'] / steps['none']:.2f} |",
        flush=True,
    )


@click.command(cls=EngineCommand, help=__doc__, context_settings={"max_content_width": 100})
@click.option("--rounds", default=3, show_default=True)
def main(rounds: int, config: EngineConfig) -> None:
    spec = load_plugins().load_spec(with_head(checkpoint(config.model)))
    asyncio.run(compare(config, spec, rounds))


if __name__ == "__main__":
    main()
