"""The report in Markdown: machine, checks, limits of the device, timings, and what was skipped."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from dashinfer_vlm_core import __version__
from dashinfer_vlm_core.kernels.cpu import cpu_model

from .checks import CheckResult
from .device_limits import DeviceLimits
from .time_limit import Skipped
from .timings import ModelTimings, StepTiming

LIBRARIES = ("torch", "transformers", "triton", "flash-attn", "numpy", "safetensors", "tokenizers")
"""Distributions whose versions the report states, if they are installed."""
KERNEL_CHARACTERS = 100
"""Of the name of a kernel: those of templates have hundreds."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run found.

    Attributes:
        device: that it ran on.
        checks: in order.
        limits: None if nothing was timed, or that failed.
        timings: of each model.
        skipped: what was left out.
        fault: why the limits could not be measured; empty if they were, or were not requested.
        seconds: that the run took.
    """

    device: str
    checks: Sequence[CheckResult]
    limits: DeviceLimits | None = None
    timings: Sequence[ModelTimings] = ()
    skipped: Sequence[Skipped] = ()
    fault: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> list[str]:
        """Names of what failed; the exit code is 1 if there are any."""
        return [
            *(check.name for check in self.checks if not check.passed),
            *(["limits of the device"] if self.fault else []),
            *(f"timings of {timings.name}" for timings in self.timings if timings.fault),
        ]

    @property
    def verdict(self) -> str:
        """One line."""
        if self.failed:
            return f"FAILED on {self.device}: {'; '.join(self.failed)}."
        parts = "1 part was" if len(self.skipped) == 1 else f"{len(self.skipped)} parts were"
        skipped = f" {parts} skipped." if self.skipped else ""
        return f"All {len(self.checks)} checks passed on {self.device}.{skipped}"


def markdown(report: Report) -> str:
    """Return the whole report; it ends with the verdict."""
    lines = [f"# Verification on `{report.device}`", "", *_machine(report), "", "## Checks", ""]
    lines += ["| check | result | measured | criterion |", "|---|---|---|---|"]
    for check in report.checks:
        passed = "passed" if check.passed else "**FAILED**"
        lines.append(f"| {check.name} | {passed} | {_cell(check.figure)} | {check.criterion} |")
    lines += ["", *_limits(report)]
    for timings in report.timings:
        lines += [f"## Model `{timings.name}`", "", *_model(timings, report.limits)]
    lines += [*_skipped(report), f"**{report.verdict}**", ""]
    return "\n".join(lines)


def _machine(report: Report) -> Iterator[str]:
    device = report.device
    yield f"* dashinfer-vlm-adapters {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"* {', '.join(f'{name} {found}' for name in LIBRARIES if (found := _version(name)))}"
    yield f"* {cpu_model()}, {torch.get_num_threads()} threads of PyTorch"
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"compute capability {properties.major}.{properties.minor}"
        processors = f"{properties.multi_processor_count} multiprocessors"
        yield f"* {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {processors}, {capability}"
        yield f"* CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]
    yield f"* {report.seconds:.0f} s in total"


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _limits(report: Report) -> Iterator[str]:
    """The section, if something was timed."""
    if report.fault:
        yield from ("## Limits of the device", "", f"Failed: {_cell(report.fault)}", "")
    if report.limits is None:
        return
    yield from ("## Limits of the device", "", "| measured | rate |", "|---|---|")
    yield f"| copy in memory, bytes read and written | {report.limits.bytes_per_second / 1e9:,.0f} GB/s |"
    yield f"| product of bfloat16 matrices | {report.limits.flop_per_second / 1e12:,.1f} TFLOP/s |"
    yield ""


def _model(timings: ModelTimings, limits: DeviceLimits | None) -> Iterator[str]:
    load = timings.load
    yield (
        f"{timings.title[0].upper()}{timings.title[1:]}, random weights, bfloat16. Images of {load.side}x{load.side}"
        f" pixels and a few words, responses of {load.tokens} tokens, greedy, without speculation. Times are"
        " medians, those of steps means."
    )
    yield ""
    if timings.fault:
        yield from (f"Failed: {_cell(timings.fault)}", "")
    if timings.requests:
        yield "| requests | users | prompt tokens | TTFT, ms | TPOT, ms | tokens/s | requests/s |"
        yield "|---|---|---|---|---|---|---|"
        for request in timings.requests:
            times = f"{1000 * request.ttft:.1f} | {1000 * request.tpot:.2f}"
            rates = f"{request.tokens_per_second:.0f} | {request.requests_per_second:.2f}"
            yield f"| {request.workload} | {request.users} | {request.prompt_tokens} | {times} | {rates} |"
        yield ""
    if timings.steps:
        yield "| sequences in a step | tokens of each | ms | tokens/s | GB/s read | of the copy's | device idle |"
        yield "|---|---|---|---|---|---|---|"
        for step in timings.steps:
            share = _percent(step.bytes_per_second / limits.bytes_per_second if limits else None)
            rates = f"{step.sequences / step.seconds:.0f} | {step.bytes_per_second / 1e9:,.0f} | {share}"
            idle = _percent(step.idle_share)
            yield f"| {step.sequences} | {step.context} | {1000 * step.seconds:.2f} | {rates} | {idle} |"
        yield ""
        yield from _profile(timings.steps[-1])
    if timings.towers:
        yield "| images in a pass of the vision encoder | ms | images/s | TFLOP/s | of the product's |"
        yield "|---|---|---|---|---|"
        for tower in timings.towers:
            share = _percent(tower.flop_per_second / limits.flop_per_second if limits else None)
            rates = f"{tower.images / tower.seconds:.1f} | {tower.flop_per_second / 1e12:,.2f} | {share}"
            yield f"| {tower.images} | {1000 * tower.seconds:.2f} | {rates} |"
        yield ""


def _profile(step: StepTiming) -> Iterator[str]:
    """The kernels of a step, if they were recorded."""
    if step.kernels:
        yield f"| kernels of a step of {step.sequences} sequences | of the time of all |"
        yield "|---|---|"
        for kernel in step.kernels:
            yield f"| `{_cell(kernel.name)[:KERNEL_CHARACTERS]}` | {_percent(kernel.share)} |"
        yield ""


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{100 * share:.1f} %"


def _skipped(report: Report) -> Iterator[str]:
    if report.skipped:
        yield from ("## Skipped", "")
        yield from (f"* {skipped.name}: {_cell(skipped.reason)}." for skipped in report.skipped)
        yield ""


def _cell(text: str) -> str:
    """Return what a table can hold."""
    return " ".join(text.replace("|", "/").split())
