"""`scripts/verify-gpu`: arguments in, report out."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

import dashinfer_vlm_core.kernels
import dashinfer_vlm_core.models.qwen2_vl
import dashinfer_vlm_cpu
import dashinfer_vlm_torch
from dashinfer_vlm_core.plugins import Registry

from .checks import run_checks
from .report import Report, markdown
from .timings import LOADS, Timing, ensure_timing_model, measure

MODELS = {
    "small": "`small` (582 M parameters, random weights, made by benchmarks/models.py)",
    "tiny": "A model of one layer, whose figures mean nothing",
}


def built_in_registry() -> Registry:
    """The parts that run, registered by hand: there need not be an installation with entry points."""
    registry = Registry()
    registry.add_plugin(dashinfer_vlm_core.models.qwen2_vl, name="qwen2_vl")
    registry.add_plugin(dashinfer_vlm_core.kernels, name="kernels")
    registry.add_plugin(dashinfer_vlm_cpu, name="cpu")
    registry.add_plugin(dashinfer_vlm_torch, name="torch")
    return registry


def main(
    arguments: Sequence[str] | None = None, *, help_text: str | None = None, registry: Registry | None = None
) -> int:
    """Run everything and print the report.

    Args:
        arguments: of the command line; `sys.argv` if None.
        help_text: what --help begins with.
        registry: has the parts to verify; the built-in ones if None.

    Returns:
        The exit code: 0 if all passed, 1 if something failed, 2 if the device cannot be used.
    """
    options = _parse(arguments, help_text)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(_no_cuda(), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        report = verify(registry or built_in_registry(), options.device, options.model, Path(scratch))
    text = markdown(report)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    print(text)
    return 1 if report.failed else 0


def verify(registry: Registry, device: str, model: str, scratch: Path) -> Report:
    """Checks, and then timings of `model`, one of `LOADS`, or "none"; `scratch` is an empty folder."""
    tiny = scratch / "checks"
    tiny.mkdir()
    checks = run_checks(registry, device=device, folder=tiny, note=_note)
    if model == "none":
        return Report(device=device, checks=checks)
    _note(f"timings of {model}")
    timings, fault = list[Timing](), ""
    try:
        timings = measure(registry, device=device, folder=ensure_timing_model(model, scratch), load=LOADS[model])
    except Exception as error:  # noqa: BLE001 - the checks are worth their report whatever happens here
        fault = f"{type(error).__name__}: {error}"[:300]
    return Report(device=device, checks=checks, timings=timings, timed=MODELS[model], load=LOADS[model], fault=fault)


def _parse(arguments: Sequence[str] | None, help_text: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/verify-gpu", description=help_text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="what to verify (default: cuda)")
    choices = [*LOADS, "none"]
    parser.add_argument("--model", choices=choices, help="what to time (default: small on cuda, tiny on cpu)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the report to this file")
    options = parser.parse_args(arguments)
    options.model = options.model or ("small" if options.device == "cuda" else "tiny")
    return options


def _no_cuda() -> str:
    """Return why CUDA is not available, and the next step."""
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is a build without CUDA: install one with CUDA"
    else:
        reason = f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU or no driver: check `nvidia-smi`"
    return f"`--device cuda` cannot be used here: {reason}. `--device cpu` runs the same checks on the CPU."


def _note(step: str) -> None:
    print(f"... {step}", file=sys.stderr, flush=True)
