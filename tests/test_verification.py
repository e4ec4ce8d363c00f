"""`dashinfer-vlm verify` on the CPU: the checks pass, failures are reported, and what does not fit is skipped."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForImageTextToText

from benchmarks.limits import qwen2_vision_flop, step_bytes
from dashinfer_vlm_cli.verification import report, timings
from dashinfer_vlm_cli.verification.checkpoint import Checkpoint, Reference
from dashinfer_vlm_cli.verification.checks import OPTIONS, Session, check_family, compare_decoder
from dashinfer_vlm_cli.verification.models import SIZES, build_model, count_weights, write_model
from dashinfer_vlm_cli.verification.report import Check, Results, Timing
from dashinfer_vlm_cli.verify import SIZES as CHOICES
from dashinfer_vlm_cli.verify import verify
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders import DecoderSupport
from dashinfer_vlm_core.errors import ConfigError, PluginError
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec, read_vision_config
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_dashinfer.environment import private_folder
from dashinfer_vlm_torch.decoder import TorchDecoder
from tests.cases import cases
from tests.scripts import load_script

CHECKS = 8
"""Of a family in a data type."""
TINY = SIZES["tiny"]


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
            longer = max(60, request.sampling.max_tokens)
            slow = replace(request, sampling=replace(request.sampling, max_tokens=longer))
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


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("DASHINFER_VLM_CACHE_DIR", str(folder))
    return folder


def invoke(*arguments, registry=None):
    return CliRunner().invoke(verify, list(map(str, arguments)), obj=registry, catch_exceptions=False)


def test_unwritable_cache_is_reported(cache):
    cache.write_text("")
    with pytest.raises(ConfigError, match=f"The cache folder {cache} cannot be written to: File exists"):
        invoke("--device", "cpu", "--family", "qwen2_vl", "--model", "none")


def registry_with(decoder, name="torch"):
    registry = load_plugins()
    support = DecoderSupport(score=1, reason="")
    members = {"name": name, "create": decoder, "check_support": lambda self, spec, config: support}
    registry.decoders[name] = type("Factory", (), members)()
    return registry


def failures(decoder, tmp_path, family="qwen2_vl"):
    """Return the checks that fail with a decoder, without family and data type."""
    results = new_results()
    checkpoint = Checkpoint(registry=registry_with(decoder), device="cpu", folder=tmp_path / family)
    asyncio.run(check_family(results, checkpoint, family))
    assert len(results.checks) == 2 * CHECKS
    return {name.split(": ")[-1] for name in results.failed}


def new_results(limit=100.0, **options):
    return Results("cpu", limit, lambda step: None, **options)


def rows(markdown):
    """Return the result of each check by name."""
    cells = [[cell.strip() for cell in line.split("|")] for line in markdown.splitlines() if line.startswith("| ")]
    return {line[1]: line[2] for line in cells if line[2] in ("passed", "**FAILED**")}


@pytest.mark.slow
def test_all_families_pass_and_tiny_model_is_timed(cache, monkeypatch):
    for name, value in {"SIDE": 56, "PROMPTS": (64,), "CONTEXT": 16, "STEPS": 4, "ROUNDS": 1}.items():
        monkeypatch.setattr(timings, name, value)
    families = load_plugins().families
    done = invoke("--device", "cpu")
    markdown = done.stdout.rstrip()
    assert (done.exit_code, markdown.splitlines()[-1]) == (
        0,
        f"**All {2 * CHECKS * len(families)} checks passed on cpu, {len(families)} parts skipped.**",
    )
    assert set(rows(markdown).values()) == {"passed"}
    assert {name.split()[0] for name in rows(markdown)} == set(families)
    number = r"[\d.,]+"
    unit = r"(?:tokens|images)/s \| [\d.,]+ (?:GB|TFLOP)/s"
    timed = re.findall(
        rf"^\| tiny: (.*?) \| ({number}) \| {number} {unit} \| {number} % \| not measured \|$", markdown, re.MULTILINE
    )
    assert [name for name, _ in timed] == [
        *(f"vision encoder, {images} images" for images in (1, 4, 16)),
        "prompt of 64 tokens",
        *(f"decode step, {sequences} sequences" for sequences in (1, 8, 32)),
    ]
    assert all(float(milliseconds) > 0 for _, milliseconds in timed)  # of a step, not between waiting tokens
    assert re.search(rf"^A copy in memory reads and writes {number} GB/s", markdown, re.MULTILINE)
    assert "* qwen2_vl: dashinfer: it is verified on CUDA only." in markdown
    assert not list(cache.glob("dashinfer-vlm-verify-*"))


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_wrong_token_fails():
    options = ("--device", "cpu", "--model", "none", "--family", "qwen2_vl")
    done = invoke(*options, registry=registry_with(WrongThirdToken))
    assert done.exit_code == 1
    passed = [name for name, result in rows(done.stdout).items() if result == "passed"]
    assert passed == [f"qwen2_vl {dtype}: vision encoder, 3 images, 1 video" for dtype in ("float32", "bfloat16")]
    assert re.search(r"float32: greedy tokens of 5 at once \| \*\*FAILED\*\* \| .*first 2 of 16 equal", done.stdout)
    assert "## Timings" not in done.stdout


@pytest.mark.slow
def test_prefix_cache_that_ignores_images_fails(tmp_path):
    assert failures(StaleImages, tmp_path, "qwen2_5_vl") == {"prefix cache, images"}


@pytest.mark.slow
def test_request_that_runs_after_cancellation_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("dashinfer_vlm_cli.verification.checks.IDLE_POLLS", 1)
    assert "2 of 5 canceled after 3 tokens" in failures(NeverCanceled, tmp_path)


async def check_decoder(checkpoint, **options):
    """Check an engine with other options, in float32."""
    write_model(build_model("qwen2_5_vl", TINY), checkpoint.folder)
    exact = Reference(checkpoint, torch.float32)
    async with checkpoint.decoding(checkpoint.config("float32", **OPTIONS)) as engine:
        return await compare_decoder(Session(checkpoint, "float32", exact, exact, engine), **options)


@pytest.mark.slow
@pytest.mark.parametrize(("decoder", "passed"), [(TorchDecoder, True), (WrongThirdToken, False)])
def test_other_decoders_are_compared(tmp_path, decoder, passed):
    registry = registry_with(decoder, name="dashinfer")
    checkpoint = Checkpoint(registry=registry, device="cpu", folder=tmp_path / "model")
    check = asyncio.run(check_decoder(checkpoint, decoder="dashinfer"))
    assert check.passed == passed
    assert ("all 80 equal" in check.figure, "video: first 2 of 16 equal" in check.figure) == (passed, not passed)


@pytest.mark.dashinfer
def test_dashinfer_equals_transformers_in_check(tmp_path):
    checkpoint = Checkpoint(registry=load_plugins(), device="cpu", folder=tmp_path / "model")
    if not private_folder(EngineConfig()).exists():
        pytest.skip("DashInfer's environment is not installed.")
    check = asyncio.run(check_decoder(checkpoint, decoder="dashinfer", max_model_len=1024))
    assert check.figure == "all 32 equal"  # only texts: on a CPU, it takes no images


@pytest.mark.skipif(torch.cuda.is_available(), reason="There is a GPU here.")
def test_reasons_of_other_decoders_are_reported(tmp_path):
    write_model(build_model("qwen2_vl", TINY), tmp_path)
    on_cpu, on_cuda = (
        Checkpoint(registry=load_plugins(), device=device, folder=tmp_path).other_decoders()
        for device in ("cpu", "cuda")
    )
    assert on_cpu == {"dashinfer": "it is verified on CUDA only"}
    assert on_cuda.keys() == on_cpu.keys()
    assert all(on_cuda.values())


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_timings_without_time_are_skipped_and_named(monkeypatch):
    async def passes(results, checkpoint, family):
        results.checks[family] = Check(True, "", "")

    monkeypatch.setattr("dashinfer_vlm_cli.verification.checks.check_family", passes)
    done = invoke("--device", "cpu", "--minutes", 0, "--model", "tiny", "--model", "7b", "--family", "qwen2_vl")
    markdown = done.stdout
    assert done.exit_code == 0
    assert re.search(r"^\* model tiny: 0 s of 0 s were left.*: see `--minutes`\.$", markdown, re.MULTILINE)
    assert re.search(r"^\* model 7b: 0 s of 0 s were left and it takes about \d+ s: see", markdown, re.MULTILINE)
    assert markdown.rstrip().splitlines()[-1] == "**All 1 checks passed on cpu, 2 parts skipped.**"


def test_time_limit_skips_estimated_parts():
    now = [0.0]
    results = new_results(clock=lambda: now[0])
    assert results.allows("short", 60)
    now[0] = 60
    assert not results.allows("long", 60)
    assert results.allows("shorter", 30)
    assert results.skipped == {"long": "40 s of 100 s were left and it takes about 60 s: see `--minutes`"}


@pytest.mark.slow
def test_long_passes_of_the_vision_encoder_are_skipped(tmp_path, monkeypatch):
    now, seconds = [0.0], 20.0
    results = new_results(clock=lambda: now[0])
    model = build_model("qwen2_vl", TINY)
    write_model(model, tmp_path / "tiny")
    checkpoint = Checkpoint(registry=load_plugins(), device="cpu", folder=tmp_path / "tiny")

    async def measure(self, encoder, images):
        now[0] += seconds
        return Timing(seconds, images, "images", 1.0, "product")

    monkeypatch.setattr(timings.ModelTimer, "_pass", measure)
    asyncio.run(timings.ModelTimer(results, checkpoint, count_weights(model), "torch").encoder())
    assert list(results.timings) == ["tiny: vision encoder, 1 images"]
    assert list(results.skipped) == [f"tiny: vision encoder, {images} images" for images in (4, 16)]


def test_part_is_stopped_at_time_limit():
    results = new_results(0.05)
    asyncio.run(results.time("steps", partial(asyncio.sleep, 100)))
    assert (results.timings, results.checks) == ({}, {})
    assert results.skipped == {"steps": "it was stopped at the time limit: see `--minutes`"}


@cases(
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
    assert timings.idle_share(busy) == (share if share is None else pytest.approx(share))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="There is a GPU here.")
def test_failure_of_profiler_is_named(tmp_path):
    model = build_model("qwen2_vl", TINY)
    write_model(model, tmp_path / "tiny")
    checkpoint = Checkpoint(registry=load_plugins(), device="cuda", folder=tmp_path / "tiny")
    results = new_results()
    timer = timings.ModelTimer(results, checkpoint, count_weights(model), "torch")
    assert asyncio.run(timer._profile(8, 0.0)) is None
    assert list(results.skipped) == ["tiny: profile of 8 sequences"]


def test_report_states_shares_of_limits_and_failures():
    results = new_results()
    results.limits = {"copy": 2e12, "product": 6e14}
    results.timings["2b: step"] = Timing(0.01, 32, "tokens", 1.5e10, "copy", 0.034)
    results.timings["2b: vision"] = Timing(0.02, 16, "images", 6e12, "product")

    async def fails():
        raise RuntimeError("OOM | x")

    asyncio.run(results.check("timings of 2b", fails()))
    markdown = report.as_markdown(results)
    assert "| 2b: step | 10.00 | 3,200.0 tokens/s | 1,500.00 GB/s | 75.0 % | 3.4 % |" in markdown
    assert "| 2b: vision | 20.00 | 800.0 images/s | 300.00 TFLOP/s | 50.0 % | not measured |" in markdown
    assert "| timings of 2b | **FAILED** | RuntimeError: OOM / x | runs |" in markdown
    assert markdown.endswith("**FAILED on cpu: timings of 2b.**")


@pytest.mark.slow
def test_model_is_complete_checkpoint(tmp_path):
    model = build_model("qwen2_vl", TINY)
    counted = count_weights(model)
    write_model(model, tmp_path)
    _, loading = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values())
    matrix = model.lm_head.weight.detach()[:4600]
    assert len({row.tobytes() for row in matrix.view(torch.int16).numpy()}) == len(matrix)
    text, patches = read_spec(tmp_path).text, 64
    assert 2 * (counted.text + counted.head) == pytest.approx(step_bytes(text, packed=False), rel=0.01)
    assert counted.kv == 2 * text.attention.num_kv_heads * text.attention.head_dim * len(text.layers)
    config = read_vision_config(tmp_path)
    attention = 4 * patches**2 * config.hidden_size * config.depth
    merger = 2 * patches * 0.75 * 4 * config.hidden_size * (4 * config.hidden_size + config.output_size)
    exact = qwen2_vision_flop(config, patches) - attention
    assert 2 * patches * counted.vision == pytest.approx(exact + merger, rel=0.01)


@pytest.mark.parametrize(("name", "gigabytes"), [("small", 1.16), ("2b", 4.42), ("7b", 15.49)])
def test_size_of_model(name, gigabytes):
    assert build_model("qwen2_vl", SIZES[name]).get_memory_footprint() / 1e9 == pytest.approx(gigabytes, abs=0.01)


def test_choices_are_those_of_verification():
    assert tuple(SIZES) == CHOICES


def test_checkout_registers_what_is_verified():
    registry = load_script("verify_gpu").built_in_registry()
    assert registry.families.keys() == load_plugins().families.keys()
    assert "torch" in registry.decoders


@pytest.mark.skipif(torch.cuda.is_available(), reason="There is a GPU here.")
@pytest.mark.parametrize("device", ["cuda", "tpu"])
def test_unusable_device_is_reported(device):
    done = invoke("--device", device)
    assert done.exit_code == 2
    assert f"`--device {device}` cannot be used: " in done.stderr


def test_no_model_excludes_others():
    done = invoke("--device", "cpu", "--model", "none", "--model", "tiny")
    assert (done.exit_code, "`--model none` excludes other models." in done.stderr) == (2, True)


def test_unknown_family_is_rejected():
    with pytest.raises(PluginError, match="unknown_vl"):
        invoke("--device", "cpu", "--family", "unknown_vl")


@pytest.mark.usefixtures("cache")
def test_family_without_reference_is_skipped():
    registry = load_plugins()
    registry.families["unknown_vl"] = registry.families["qwen2_vl"]
    done = invoke("--device", "cpu", "--family", "unknown_vl", "--model", "none", registry=registry)
    assert "* unknown_vl: transformers has no such model to compare it with." in done.stdout
