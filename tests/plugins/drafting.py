"""Decoders with a drafter of their own weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_torch.decoder import TorchDecoder
from tests.kernels import selector

from .oracle import at_once, decoding, ids

SEEDED = {"temperature": 0.8, "seed": 7}
LONG = {"max_tokens": 30, "ignore_eos": True}


def create(folder, draft=None, **options):
    """Return a decoder of the Qwen2-VL in `folder`; `draft` as in `ModelSpec`."""
    return create_from(replace(read_spec(folder), draft=draft), **options)


def create_from(spec, **options):
    config = EngineConfig(**{"device": "cpu", "dtype": "float32", "kv_cache_mib": 64} | options)
    return TorchDecoder(spec, config, selector(config))


@asynccontextmanager
async def started(decoder):
    """Start a decoder that assumes the usual costs of drafts: measured ones depend on the machine."""
    async with decoding(decoder) as running:
        running._worker._scheduler.speculator.record_seconds = lambda *_: None
        yield running


def run(decoder, requests, *, how=at_once, watch: Callable = lambda drafter: None):
    """Return the ids of the completions, the final statistics, and what `watch` returned for the drafter."""

    async def main():
        async with started(decoder) as running:
            watched = watch(running._worker._runner._drafter)
            found = await how(running, requests)
            return [ids(tokens) for tokens in found], running.snapshot(), watched

    return asyncio.run(main())


def recorded_logits(drafter, logits):
    """Return a list to which what a drafter samples from is added: the request, the output with the drafted tokens, how
    many of them are drafted, and the logits."""
    found = []
    sample = drafter._sample

    def record(x, rows):
        found.extend(
            (row.sequence.request, row.sequence.output_ids + list(row.draft), len(row.draft), each)
            for row, each in zip(rows, logits(x), strict=True)
        )
        return sample(x, rows)

    drafter._sample = record
    return found
