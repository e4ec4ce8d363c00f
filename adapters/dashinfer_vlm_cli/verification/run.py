"""A whole run: checks, limits of the device, and timings of models, as far as the time permits."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.plugins import Registry

from .checkpoint import Checkpoint
from .checks import check_family
from .models import SIZES, build_model, count_weights, write_model
from .report import Results
from .timings import ModelTimer, measure_limits

SECONDS_PER_BYTE = 12e-9  # to write and load a model
EXTRA_MEMORY = 8 << 30  # of the device, for what is not weights: the KV cache of 4 GiB, and activations


async def verify_device(results: Results, registry: Registry, families: Sequence[str], sizes: Sequence[str]) -> None:
    """Check families, at least one, and time models of the first one; `sizes` are keys of `SIZES`."""
    parent = EngineConfig().cache_folder
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dashinfer-vlm-verify-", dir=parent) as scratch:
        for family in families:
            if family in CONFIG_MAPPING:
                checkpoint = Checkpoint(registry=registry, device=results.device, folder=Path(scratch, family))
                await results.check(family, check_family(results, checkpoint, family))
            else:
                results.skipped[family] = "transformers has no such model to compare it with"
            free_memory()
        if sizes:
            await results.check("limits of the device", measure_limits(results))
        for size in sizes:
            checkpoint = Checkpoint(registry=registry, device=results.device, folder=Path(scratch, size))
            await results.check(f"timings of {size}", _time_model(results, checkpoint, families[0]))
            shutil.rmtree(checkpoint.folder, ignore_errors=True)
            free_memory()


async def _time_model(results: Results, checkpoint: Checkpoint, family: str) -> None:
    size = checkpoint.folder.name
    model = build_model(family, SIZES[size])
    weights = count_weights(model)
    nbytes = model.get_memory_footprint()
    if not results.allows(f"model {size}", SECONDS_PER_BYTE * nbytes):
        return
    if checkpoint.is_on_cuda and nbytes + EXTRA_MEMORY > (free := torch.cuda.mem_get_info(checkpoint.device)[0]):
        needed = f"it needs about {(nbytes + EXTRA_MEMORY) / 1e9:.1f} GB of memory"
        results.skipped[f"model {size}"] = f"{needed}, and {free / 1e9:.1f} GB of the device are free"
        return
    write_model(model, checkpoint.folder)
    await ModelTimer(results, checkpoint, weights, "torch").encoder()
    for decoder in ["torch", *(name for name, reason in checkpoint.other_decoders().items() if not reason)]:
        free_memory()
        await ModelTimer(results, checkpoint, weights, decoder).decoder()


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
