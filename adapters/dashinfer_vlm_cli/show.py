"""`dashinfer-vlm show`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dashinfer_vlm_core.cli.terminal import show_table
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.config.folders import expand_user
from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.models.checkpoint import cached_models
from dashinfer_vlm_core.models.memory import ModelSize, count_weights
from dashinfer_vlm_core.plugins import Registry, load_plugins

from .engines import log_warnings_only
from .fit import TUNE_STEP, Fit, FitEstimator, rate_text, size_text
from .models import fit_variants, model_row

if TYPE_CHECKING:
    from dashinfer_vlm_core.models.spec import ModelSpec


BYTES = "_bytes"
"""Suffix of the names of sizes in JSON."""

_FACTS = (
    "model", "source", "folder", f"size{BYTES}", f"download{BYTES}", "architecture", "weights", "dtype", "quantization",
    "context", "capabilities", "problem",
)  # fmt: skip
"""The facts of each model; those of one that is not downloaded are mostly unknown."""


@click.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def show(*, model: str, as_json: bool) -> None:
    """Show what a model is, and what it needs of this machine.

    MODEL is a registered name, a checkpoint folder, a downloaded model, or one that `models --fits` lists. Memory and
    speed are estimates for the CPU. Nothing is downloaded.
    """
    log_warnings_only()
    registry = load_plugins()
    estimator = FitEstimator(EngineConfig(device="cpu"), registry)
    facts, size = _describe(registry, model)
    fit = estimator.fit(model, size)
    if as_json:
        click.echo(json.dumps({**facts, "memory_bytes": fit.memory, **fit_variants(fit)}, indent=2))
        return
    show_table(
        ("Property", "Value"),
        [(name.removesuffix(BYTES), _fact_text(name, value)) for name, value in facts.items() if value],
    )
    click.echo()
    _show_needs(fit)
    if not estimator.is_measured:
        click.echo(f"\nTokens/s are not known: {TUNE_STEP}")


def _describe(registry: Registry, model: str) -> tuple[dict[str, object], ModelSize]:
    from dashinfer_vlm_core.models.task import read_pooling

    origin, folder = _find(registry, model)
    if folder is None:
        size = _published(model)
        known = {"model": model, "source": origin, f"download{BYTES}": size.file_bytes, "weights": count_weights(size)}
        return dict.fromkeys(_FACTS) | known, size
    row = model_row(registry, model, origin, folder)
    spec = registry.load_spec(folder)
    size = ModelSize.of(replace(spec, pooling=read_pooling(spec, "auto")))
    facts: dict[str, object] = {
        "model": model,
        "source": origin,
        "folder": str(folder),
        f"size{BYTES}": row.bytes,
        "architecture": spec.model_type,
        "weights": count_weights(size),
        "dtype": spec.dtype,
        "quantization": spec.quantization.name if spec.quantization else "",
        "context": spec.max_model_len,
        "capabilities": _capabilities(spec),
        "problem": row.problem,
    }
    return dict.fromkeys(_FACTS) | facts, size


def _find(registry: Registry, model: str) -> tuple[str, Path | None]:
    if model in registry.models:
        return "registered", registry.models[model]
    folder = expand_user(model)
    if (folder / "config.json").is_file():
        return "folder", folder
    if cached := cached_models().get(model):
        return "downloaded", cached
    return "not downloaded", None


def _published(model: str) -> ModelSize:
    from dashinfer_vlm_core.models.published import MODELS, hub_id

    sizes = {hub_id(name): size for name, size in MODELS.items()}
    if model not in sizes:
        raise CheckpointError(
            f"There is no model {model!r} on this machine. `dashinfer-vlm models` lists those that are, and"
            " `dashinfer-vlm pull OWNER/NAME` shows what a model needs before it downloads it.",
            param="model",
        )
    return sizes[model]


def _fact_text(name: str, value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, int) and name.endswith(BYTES):
        return size_text(value)
    return _billions(value) if isinstance(value, int) and name == "weights" else str(value)


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f} billion" if count >= 1e8 else f"{count / 1e6:.1f} million"


def _capabilities(spec: ModelSpec) -> list[str]:
    profile = spec.profile
    found = {"images": profile.images, "videos": profile.videos, "tools": profile.tools, "reasoning": profile.reasoning}
    return [name for name, has in found.items() if has]


def _show_needs(fit: Fit) -> None:
    rows = []
    for each in fit.variants:
        estimate = each.estimate
        # From rounded numbers, so that a row adds up.
        other = _rounded(estimate.total) - _rounded(estimate.weights) - _rounded(estimate.kv_cache)
        parts = (estimate.weights, estimate.kv_cache, other)
        total = f"{size_text(estimate.total)} of {size_text(fit.memory)}"
        rows.append((each.bits, *map(size_text, parts), total, rate_text(each.tokens_per_second)))
    show_table(("Bits", "Weights", "KV cache", "Other", "Memory", "Tokens/s"), rows)
    click.echo(
        "\nWeights are as the CPU kernels of this machine keep them, which can be smaller or larger than the files."
    )
    if advice := fit.advice():
        click.echo(f"\n{advice}")


def _rounded(count: int) -> float:
    """Round a number of bytes as `size_text` does from 0.1 GB on."""
    return round(count / 1e9, 1) * 1e9
