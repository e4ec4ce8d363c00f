"""`dashinfer-vlm verify` on the CPU: the checks pass, failures are reported, and what does not fit is skipped."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from benchmarks.limits import step_bytes as bytes_of_spec
from benchmarks.limits import tower_flop as flop_of_config
from dashinfer_vlm_cli.verification import profiling, timings
from dashinfer_vlm_cli.verification.checks import CheckResult, run_checks
from dashinfer_vlm_cli.verification.dashinfer import DashInferCheck
from dashinfer_vlm_cli.verification.device_limits import DeviceLimits
from dashinfer_vlm_cli.verification.report import Report, markdown
from dashinfer_vlm_cli.verification.speed_models import SPEED_MODELS, write_speed_model
from dashinfer_vlm_cli.verification.time_limit import TimeLimit
from dashinfer_vlm_cli.verification.timings import ModelTimings, StepTiming, TowerTiming
from dashinfer_vlm_cli.verification.tiny_models import FAMILIES
from dashinfer_vlm_cli.verification.workloads import step_bytes, tower_flop
from dashinfer_vlm_cli.verify import FAMILIES as CHOICES
from dashinfer_vlm_cli.verify import MODELS, verify
from dashinfer_vlm_core.decoders import DecoderSupport
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec, read_vision_config
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_torch.decoder import TorchDecoder
from tests.scripts import load_script

ROOT = Path(__file__).parents[1]
CHECKS = 7 * 2
"""Of a family, in two data types."""


class WrongThirdToken(TorchDecoder):
    """A decoder that replaces the third token by its neighbor."""

    async def decode(self, request):
        count = 0
        async for token in super().decode(request):
            count += 1
            yield replace(token, id=token.id ^ 1) if count == 3 else token


class StaleImages(TorchDecoder):
    """A decoder whose prefix cache does not distinguish images."""

    async def decode(self, request):
        spans = tuple(replace(span, tokens=replace(span.tokens, digest=bytes(32))) for span in request.spans)
        async for token in super().decode(replace(request, spans=spans)):
            yield token


class NeverCanceled(TorchDecoder):
    """A decoder that decodes canceled requests to their end in the background."""

    async def start(self):
        await super().start()
        self.tasks = []

    async def decode(self, request):
        queue = asyncio.Queue()

        async def run():
            slow = replace(request, sampling=replace(request.sampling, max_tokens=2000))
            async for token in super(NeverCanceled, self).decode(slow):
                queue.put_nowait(token)

        self.tasks.append(asyncio.create_task(run()))
        for _ in range(request.sampling.max_tokens):
            yield await queue.get()

    async def close(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await super().close()


def invoke(*arguments, registry=None):
    return CliRunner().invoke(verify, list(map(str, arguments)), obj=registry, catch_exceptions=False)


def registry_with(decoder):
    registry = load_plugins()
    registry.decoders["torch"] = type("Factory", (), {"name": "torch", "create": decoder})()
    return registry


def failures(decoder, tmp_path, family="qwen2_vl"):
    """Return the checks that fail with a decoder, without family and data type."""
    registry = registry_with(decoder)
    results = run_checks(registry, device="cpu", families=[family], folder=tmp_path, note=lambda step: None)
    return {check.name.split(": ")[-1] for check in results if not check.passed}


def rows(report):
    """Return the result of each check by name."""
    cells = [[cell.strip() for cell in line.split("|")] for line in report.splitlines() if line.startswith("| ")]
    return {line[1]: line[2] for line in cells if line[2] in ("passed", "**FAILED**")}


@pytest.mark.slow
def test_all_checks_pass_and_tiny_model_is_timed(tmp_path):
    done = invoke("--device", "cpu", "--folder", tmp_path, "--out", tmp_path / "report.md")
    report = (tmp_path / "report.md").read_text()
    assert done.stdout.strip() == report.strip()
    assert (done.exit_code, report.splitlines()[-1]) == (
        0,
        f"**All {3 * CHECKS + 1} checks passed on cpu. 1 part was skipped.**",
    )
    assert set(rows(report).values()) == {"passed"}
    assert "qwen3_vl float32: vision encoder, 3 images, 1 video" in rows(report)
    number = r"[\d.,]+"
    lines = re.findall(
        rf"^\| (.*?) \| (\d+) \| \d+ \| {number} \| {number} \| \d+ \| {number} \|$", report, re.MULTILINE
    )
    chats = ("chats of two turns about an image", "32")
    assert lines == [*(("new images", users) for users in ("1", "8", "32")), chats]
    steps = rf"^\| (\d+) \| 22 \| {number} \| \d+ \| [\d,]+ \| {number} % \| not measured \|$"
    assert re.findall(steps, report, re.MULTILINE) == ["1", "8", "32"]
    assert not re.search(r"^\| \d+ \| 22 \| 0\.00 \|", report, re.MULTILINE)  # of a step, not between waiting tokens
    towers = rf"^\| (\d+) \| {number} \| {number} \| {number} \| {number} % \|$"
    assert re.findall(towers, report, re.MULTILINE) == ["1", "4", "16"]
    assert re.search(rf"^\| copy in memory, bytes read and written \| {number} GB/s \|$", report, re.MULTILINE)
    assert "* DashInfer: it is verified on CUDA only" in report
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


@pytest.mark.slow
def test_wrong_token_fails(tmp_path):
    options = ("--device", "cpu", "--model", "none", "--family", "qwen2_vl", "--folder", tmp_path)
    done = invoke(*options, registry=registry_with(WrongThirdToken))
    assert done.exit_code == 1
    report, results = done.stdout.rstrip(), rows(done.stdout)
    passed = [name for name, result in results.items() if result == "passed"]
    vision = [f"qwen2_vl {dtype}: vision encoder, 3 images, 1 video" for dtype in ("float32", "bfloat16")]
    assert passed[:-1] == vision
    assert passed[-1].startswith("sampling options")
    assert "first 2 of 16 equal" in report
    assert report.splitlines()[-1].startswith("**FAILED on cpu: qwen2_vl float32: log probabilities")


@pytest.mark.slow
def test_prefix_cache_that_ignores_images_fails(tmp_path):
    assert failures(StaleImages, tmp_path, "qwen2_5_vl") == {"prefix cache, images"}


@pytest.mark.slow
def test_request_that_runs_after_cancellation_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("dashinfer_vlm_cli.verification.checks.IDLE_SECONDS", 0.0)
    assert failures(NeverCanceled, tmp_path) == {"2 of 5 canceled after 3 tokens"}


class FakeSupport:
    """A factory that replaces DashInfer's by the PyTorch decoder."""

    name = "dashinfer"

    def __init__(self, decoder):
        self.create = decoder

    def check_support(self, spec, config):
        return DecoderSupport(score=1, reason="")


@pytest.mark.slow
@pytest.mark.parametrize("decoder", [TorchDecoder, WrongThirdToken])
def test_dashinfer_check_compares_tokens(tmp_path, decoder):
    registry = load_plugins()
    registry.decoders["dashinfer"] = FakeSupport(decoder)
    check = DashInferCheck(registry, device="cpu", family="qwen2_5_vl", folder=tmp_path)
    assert check.skip_reason() == ""
    result = check.run()
    assert result.name == "qwen2_5_vl float32: DashInfer, greedy tokens of 2 at once"
    assert (result.passed, result.figure) == {
        TorchDecoder: (True, "all 32 equal"),
        WrongThirdToken: (False, "other tokens: text, long text"),
    }[decoder]


@pytest.mark.dashinfer
def test_dashinfer_equals_transformers_in_check(tmp_path):
    check = DashInferCheck(load_plugins(), device="cpu", family="qwen2_vl", folder=tmp_path)
    if reason := check.skip_reason():
        pytest.skip(reason)
    result = check.run()
    assert result.passed, result.figure


@pytest.mark.skipif(torch.cuda.is_available(), reason="There is a GPU here.")
def test_reason_without_dashinfer_is_reported(tmp_path):
    registry = load_plugins()
    check = DashInferCheck(registry, device="cuda", family="qwen2_vl", folder=tmp_path)
    assert check.skip_reason()
    del registry.decoders["dashinfer"]
    assert check.skip_reason() == "the decoder is not registered"


def test_timings_without_time_are_skipped_and_named(tmp_path, monkeypatch):
    passed = CheckResult(name="one", passed=True, figure="", criterion="")
    monkeypatch.setattr("dashinfer_vlm_cli.verification.run.run_checks", lambda *_, **__: [passed])
    done = invoke("--device", "cpu", "--minutes", 0, "--model", "tiny", "--model", "7b", "--folder", tmp_path)
    report = done.stdout
    assert done.exit_code == 0
    assert re.search(r"^\* model tiny: 0 s of 0 s were left.*: see `--minutes`\.$", report, re.MULTILINE)
    assert re.search(r"^\* model 7b: 0 s of 0 s were left and it takes about \d+ s: see", report, re.MULTILINE)
    assert report.rstrip().splitlines()[-1] == "**All 1 checks passed on cpu. 3 parts were skipped.**"


def test_time_limit_skips_estimated_parts():
    now = [0.0]
    limit = TimeLimit(100, clock=lambda: now[0])
    assert limit.allows("short", 50)
    now[0] = 60
    assert not limit.allows("long", 50)
    assert limit.allows("shorter", 30)
    assert [(part.name, part.reason) for part in limit.skipped] == [
        ("long", "40 s of 100 s were left and it takes about 60 s: see `--minutes`")
    ]


def test_part_is_stopped_at_time_limit(tmp_path):
    limit = TimeLimit(0.05)
    timer = timings.ModelTimer(
        SPEED_MODELS["tiny"], tmp_path, load_plugins(), device="cpu", limit=limit, traces=None, note=lambda step: None
    )
    assert asyncio.run(timer._timed("requests", lambda: asyncio.sleep(100))) is None
    assert [part.reason for part in limit.skipped] == ["it was stopped at the time limit: see `--minutes`"]


@pytest.mark.parametrize(
    ("busy", "share"),
    [
        ([], None),
        ([(3.0, 3.0)], None),
        ([(0.0, 4.0)], 0.0),
        ([(6.0, 10.0), (0.0, 4.0)], 0.2),
        ([(0.0, 8.0), (1.0, 2.0), (7.0, 9.0), (9.0, 10.0)], 0.0),
        ([(10.0, 11.0), (10.5, 11.5), (14.0, 15.0)], 0.5),
    ],
)
def test_idle_share_is_time_without_kernels(busy, share):
    assert profiling.idle_share(busy) == (share if share is None else pytest.approx(share))


def test_report_states_ratios_to_limits_and_faults():
    profile = profiling.DeviceProfile(seconds={"attention": 1.0, "gemm": 3.0})
    step = StepTiming(
        sequences=32,
        context=300,
        seconds=0.01,
        bytes_per_second=1.5e12,
        idle_share=0.034,
        kernels=profile.longest(2),
    )
    tower = TowerTiming(images=16, seconds=0.02, flop_per_second=3e14)
    model = ModelTimings(name="2b", title="a model", load=timings.Load(), steps=[step], towers=[tower], fault="OOM | x")
    limits = DeviceLimits(bytes_per_second=2e12, flop_per_second=6e14)
    report = markdown(Report(device="cpu", checks=(), limits=limits, timings=[model]))
    assert "| 32 | 300 | 10.00 | 3200 | 1,500 | 75.0 % | 3.4 % |" in report
    assert "| 16 | 20.00 | 800.0 | 300.00 | 50.0 % |" in report
    assert "| kernels of a step of 32 sequences | of the time of all |\n|---|---|\n| `gemm` | 75.0 % |" in report
    assert "Failed: OOM / x" in report
    assert report.rstrip().endswith("**FAILED on cpu: timings of 2b.**")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_speed_model_is_complete_checkpoint(tmp_path, tied):
    model = replace(SPEED_MODELS["tiny"], tied=tied)
    write_speed_model(model, tmp_path)
    _, loading = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values())
    weights = load_file(tmp_path / "model.safetensors")
    assert sum(weight.nbytes for weight in weights.values()) == model.nbytes
    matrix = weights["model.embed_tokens.weight"]
    assert len({row.tobytes() for row in matrix.view(torch.int16).numpy()}) == len(matrix)
    spec = read_spec(tmp_path)
    keys = 2 * spec.text.num_key_value_heads * spec.text.head_dim * spec.text.num_hidden_layers
    expected = bytes_of_spec(spec.text, packed=False) + 2 * 3 * 10 * keys
    assert step_bytes(model, sequences=3, context=10) == expected
    assert tower_flop(model, 64) == flop_of_config(read_vision_config(tmp_path), 64)


@pytest.mark.parametrize(("name", "gigabytes"), [("small", 1.16), ("2b", 4.42), ("7b", 16.58)])
def test_size_of_speed_model(name, gigabytes):
    assert SPEED_MODELS[name].nbytes / 1e9 == pytest.approx(gigabytes, abs=0.005)


def test_choices_are_those_of_verification():
    assert tuple(FAMILIES) == CHOICES
    assert tuple(SPEED_MODELS) == MODELS


def test_checkout_registers_what_is_verified():
    script = load_script("verify_gpu")
    registry = script.built_in_registry()
    assert registry.families.keys() >= FAMILIES.keys()
    assert "torch" in registry.decoders


@pytest.mark.skipif(torch.cuda.is_available(), reason="There is a GPU here.")
def test_missing_cuda_is_reported():
    done = invoke("--device", "cuda")
    assert done.exit_code == 2
    assert "`--device cuda` cannot be used here: torch" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "tpu"), "'tpu' cannot be verified. Write cpu, cuda or cuda:N."),
        (("--device", "cpu", "--model", "none", "--model", "tiny"), "`--model none` excludes other models."),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    done = invoke(*arguments)
    assert (done.exit_code, message in done.stderr) == (2, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="There is a GPU here.")
def test_failure_of_profiler_is_named(tmp_path):
    limit = TimeLimit(100)
    timer = timings.ModelTimer(
        SPEED_MODELS["tiny"], tmp_path, load_plugins(), device="cuda", limit=limit, traces=None, note=lambda step: None
    )
    assert asyncio.run(timer._profile("profile", 0.0, None)) is None
    assert [part.name for part in limit.skipped] == [f"{tmp_path.name}: profile"]
