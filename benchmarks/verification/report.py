"""The report in Markdown: machine, checks, timings."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import transformers

from dashinfer_vlm_core import __version__

from .checks import CheckResult
from .timings import Load, Timing


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run found.

    Attributes:
        device: that it ran on.
        checks: in order.
        timings: empty if nothing was timed, or that failed.
        timed: what was timed, in words.
        load: of the timings.
        fault: why timing failed.
    """

    device: str
    checks: Sequence[CheckResult]
    timings: Sequence[Timing] = ()
    timed: str = ""
    load: Load | None = None
    fault: str = ""

    @property
    def failed(self) -> list[str]:
        """Names of what failed; the exit code is 1 if there are any."""
        return [check.name for check in self.checks if not check.passed] + ["timings"] * bool(self.fault)

    @property
    def verdict(self) -> str:
        """One line."""
        if self.failed:
            return f"FAILED on {self.device}: {'; '.join(self.failed)}."
        return f"All {len(self.checks)} checks passed on {self.device}."


def markdown(report: Report) -> str:
    """The whole report; it ends with the verdict."""
    lines = [f"# Verification on `{report.device}`", "", *_machine(report.device), "", "## Checks", ""]
    lines += ["| check | result | measured | criterion |", "|---|---|---|---|"]
    for check in report.checks:
        passed = "passed" if check.passed else "**FAILED**"
        lines.append(f"| {check.name} | {passed} | {_cell(check.figure)} | {check.criterion} |")
    lines += ["", *_timings(report), f"**{report.verdict}**", ""]
    return "\n".join(lines)


def _machine(device: str) -> Iterator[str]:
    yield f"* dashinfer-vlm-adapters {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"* torch {torch.__version__}, transformers {transformers.__version__}"
    if torch.device(device).type != "cuda":
        yield f"* {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
        return
    properties = torch.cuda.get_device_properties(device)
    capability = f"compute capability {properties.major}.{properties.minor}"
    yield f"* {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {capability}"
    yield f"* CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"


def _timings(report: Report) -> Iterator[str]:
    """The section, if something was timed."""
    if report.load is None:
        return
    yield from ("## Timings", "")
    if report.fault:
        yield from (f"Failed: {_cell(report.fault)}", "")
        return
    yield (
        f"{report.timed}, bfloat16. Each request: a new image of {report.load.side}x{report.load.side} pixels and a few"
        f" words, {report.load.tokens} tokens of response, greedy. Medians."
    )
    yield from ("", "| users | prompt tokens | time to first token, ms | time per token, ms | tokens/s, all users |")
    yield "|---|---|---|---|---|"
    for timing in report.timings:
        figures = f"{1000 * timing.first:.1f} | {1000 * timing.each:.2f} | {timing.rate:.0f}"
        yield f"| {timing.users} | {timing.prompt_tokens} | {figures} |"
    yield ""


def _cell(text: str) -> str:
    """What a table can hold."""
    return " ".join(text.replace("|", "/").split())
