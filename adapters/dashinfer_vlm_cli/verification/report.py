"""The report as Markdown or JSON: machine, checks, limits of the device, timings, and what was skipped."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import torch

from dashinfer_vlm_core import __version__
from dashinfer_vlm_core.kernels.cpu import cpu_model

from .results import Check, Results, Timing

LIBRARIES = ("torch", "transformers", "numpy", "safetensors", "tokenizers")
TIMINGS = "part | ms | rate | used | of the limit | device idle"


def as_json(results: Results) -> str:
    timings = {name: each._asdict() | {"share": results.share(each)} for name, each in results.timings.items()}
    report: dict[str, Any] = {
        "device": results.device,
        "machine": _machine(results),
        "checks": {name: check._asdict() for name, check in results.checks.items()},
        "limits": results.limits,
        "timings": timings,
        "skipped": results.skipped,
        "failed": results.failed,
    }
    return json.dumps(report, indent=2)


def as_markdown(results: Results) -> str:
    """Return the whole report; it ends with the verdict."""
    lines = [f"# Verification on `{results.device}`", "", *(f"* {line}" for line in _machine(results))]
    checks = (f"{name} | {_check_row(check)}" for name, check in results.checks.items())
    lines += ["", "## Checks", "", *_table("check | result | measured | criterion", checks)]
    if limits := results.limits:
        copy, product = f"{limits['copy'] / 1e9:,.0f} GB/s", f"{limits['product'] / 1e12:,.1f} TFLOP/s"
        lines += ["", "## Timings", "", f"A copy in memory reads and writes {copy}, bfloat16 products take {product}."]
        rows = (_timing_row(name, timing, results.share(timing)) for name, timing in results.timings.items())
        lines += ["", *_table(TIMINGS, rows)]
    if results.skipped:
        lines += ["", "## Skipped", "", *(f"* {name}: {_cell(reason)}." for name, reason in results.skipped.items())]
    passed = f"All {len(results.checks)} checks passed on {results.device}, {len(results.skipped)} parts skipped."
    verdict = f"FAILED on {results.device}: {'; '.join(results.failed)}." if results.failed else passed
    return "\n".join([*lines, "", f"**{verdict}**"])


def _machine(results: Results) -> list[str]:
    lines = [
        f"dashinfer-vlm-adapters {__version__}, Python {platform.python_version()}, {platform.platform()}",
        ", ".join(f"{name} {version(name)}" for name in LIBRARIES),
        f"{cpu_model()}, {torch.get_num_threads()} threads of PyTorch",
        f"{results.seconds:.0f} s in total",
    ]
    if torch.device(results.device).type == "cuda":
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        lines.append(f"{torch.cuda.get_device_properties(results.device)}, CUDA {torch.version.cuda}, cuDNN {cudnn}")
    return lines


def _table(columns: str, rows: Iterable[str]) -> list[str]:
    return [f"| {columns} |", f"|{'---|' * len(columns.split(' | '))}", *(f"| {row} |" for row in rows)]


def _check_row(check: Check) -> str:
    return f"{'passed' if check.passed else '**FAILED**'} | {_cell(check.figure)} | {check.criterion}"


def _timing_row(name: str, timing: Timing, share: float | None) -> str:
    unit, scale = ("GB/s", 1e9) if timing.limit == "copy" else ("TFLOP/s", 1e12)
    rate, used = timing.items / timing.seconds, timing.work / timing.seconds / scale
    shares = f"{_percent(share)} | {_percent(timing.idle_share)}"
    return f"{name} | {1000 * timing.seconds:.2f} | {rate:,.1f} {timing.unit}/s | {used:,.2f} {unit} | {shares}"


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{100 * share:.1f} %"


def _cell(text: str) -> str:
    """Return what a table can hold."""
    return " ".join(text.replace("|", "/").split())
