"""`scripts/verify-gpu` on the CPU: the checks pass, and failures are reported."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from benchmarks.verification.checks import ANSWER
from benchmarks.verification.command import built_in_registry, main
from dashinfer_vlm_torch.decoder import TorchDecoder


class WrongThirdToken(TorchDecoder):
    """A decoder that replaces the third token by its neighbor."""

    async def decode(self, request):
        count = 0
        async for token in super().decode(request):
            count += 1
            yield replace(token, id=token.id ^ 1) if count == 3 else token


class WrongFactory:
    name = "torch"
    create = WrongThirdToken


def rows(report):
    """Return the result of each check by name."""
    cells = [[cell.strip() for cell in line.split("|")] for line in report.splitlines() if line.startswith("| ")]
    return {line[1]: line[2] for line in cells if line[2] in ("passed", "**FAILED**")}


@pytest.mark.slow
def test_all_checks_pass_on_cpu(tmp_path, capsys):
    assert main(["--device", "cpu", "--out", str(tmp_path / "report.md")]) == 0
    report = (tmp_path / "report.md").read_text()
    assert capsys.readouterr().out.strip() == report.strip()
    assert report.splitlines()[-1] == "**All 15 checks passed on cpu.**"
    assert set(rows(report).values()) == {"passed"}
    assert f"float32: greedy tokens of four at once, image | passed | first {ANSWER} of {ANSWER} equal" in report
    assert re.findall(r"^\| (\d+) \| \d+ \| [\d.]+ \| [\d.]+ \| \d+ \|$", report, re.MULTILINE) == ["1", "8"]


@pytest.mark.slow
def test_wrong_token_fails(capsys):
    registry = built_in_registry()
    registry.decoders["torch"] = WrongFactory()
    assert main(["--device", "cpu", "--model", "none"], registry=registry) == 1
    report = capsys.readouterr().out.rstrip()
    results = rows(report)
    failed = [name for name, result in results.items() if result == "**FAILED**"]
    assert [name for name in failed if "greedy tokens" in name] == [name for name in results if "greedy tokens" in name]
    assert "float32: vision tower, 3 images" not in failed
    assert "first 2 of 24 equal" in report
    assert report.splitlines()[-1].startswith("**FAILED on cpu: float32: log-probabilities")


@pytest.mark.skipif(torch.cuda.is_available(), reason="There is a GPU here.")
def test_missing_cuda_is_reported(capsys):
    assert main(["--device", "cuda"]) == 2
    assert "`--device cuda` cannot be used here: torch" in capsys.readouterr().err
