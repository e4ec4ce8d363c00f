"""The benchmarks run; nothing here measures speed."""

from __future__ import annotations

import asyncio
import json
import random
import shlex
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from benchmarks import (
    attacks,
    camera_day,
    compare,
    documents,
    environments,
    formats,
    limits,
    lora,
    models,
    mtp,
    overhead,
    pooling,
    pruning,
    qwen3_5,
    qwen3_vl,
    speculation,
    stages,
    windows,
    workloads,
)
from benchmarks.checkpoint_files import linked_copy
from benchmarks.client import Sample
from benchmarks.engines import Launch, Server, end_with_us, other_engine
from benchmarks.estimates import Measurement
from benchmarks.model_table import FORMATS, MODELS, disk_bytes, model_table
from benchmarks.pooling_table import Table
from benchmarks.report import Ratio, Results, Row
from benchmarks.workloads import Run
from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.kernels.types import StepCost
from dashinfer_vlm_core.models.memory import (
    FormatBytes,
    MemoryEstimate,
    count_layer_weights,
    count_weights,
    loaded_bytes,
    step_bytes,
)
from dashinfer_vlm_core.models.qwen2_vl.config import VisionConfig
from dashinfer_vlm_core.models.spec import ModelSpec
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_core.text_spec import AttentionSpec, ExpertsSpec, LayerSpec, MlpSpec, RotarySpec, TextModelSpec
from dashinfer_vlm_qwen2_5_vl.config import Qwen25VLVisionConfig
from dashinfer_vlm_qwen3_vl.config import Qwen3VLVisionConfig
from tests.cases import cases
from tests.pages import ROOT, page_text
from tests.qwen3_5 import tiny_qwen3_5
from tests.qwen3_vl import tiny_qwen3
from tests.server.conftest import serving
from tests.tiny import to_bfloat16, write_qwen2_5_vl


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stages_reports_every_stage_of_request(tmp_path):
    model = str(tiny_qwen3.write_checkpoint(tmp_path))
    done = CliRunner().invoke(stages.main, ["--model", model, "--repeats", "1"], catch_exceptions=False)
    table = [line.split("|")[1:4] for line in done.output.splitlines() if line.startswith("| ")]
    reported = {name.strip(): float(each) for name, each, _ in table[1:]}
    for word in ("fetch", "decode it", "resize", "vision", "prompt", "prefill", "decode step, 8", "text", "server"):
        assert any(name.startswith(word) and each >= 0 for name, each in reported.items()), word
    assert not any(each == 0 for name, each in reported.items() if not name.startswith("server"))
    assert reported["decode step, 1 response"] > 0.01  # not the time between tokens of the same step


def test_pruning_reports_tokens_and_right_answers(tmp_path):
    image, video = (str(ROOT / "examples/pictures" / name) for name in ("circle.png", "moving.mp4"))
    lines = [
        {"image": image, "question": "Describe the picture.", "answer": "a red  circle"},
        {"video": video, "question": "Which way does the circle move?", "answer": "Up."},
    ]
    (tmp_path / "questions").write_text("\n".join(map(json.dumps, lines)))
    options = ["--questions", str(tmp_path / "questions"), "--rate", "0.5", "--media-workers", "0"]
    done = CliRunner().invoke(pruning.main, options, catch_exceptions=False)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.output.splitlines()]
    rows = [row for row in rows if row and row[0] in ("image", "video")]
    assert [(*row[:3], row[-1]) for row in rows] == [
        (kind, rate, "1", right) for kind, right in (("image", "100%"), ("video", "0%")) for rate in ("0%", "50%")
    ]
    for whole, pruned in (rows[:2], rows[2:]):
        assert int(whole[3]) == int(pruned[3]) + int(pruned[4])
        assert int(whole[4]) == 0 < int(pruned[4])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_windows_reports_what_is_computed_again(tiny_checkpoint, tmp_path):
    arguments = ["--model", str(tiny_checkpoint), "--frames", "8", "--side", "112", "--rounds", "1"]
    servers = ["--engines", "ours", "--logs", str(tmp_path)]
    done = CliRunner().invoke(windows.main, [*arguments, *servers], catch_exceptions=False)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.output.splitlines()]
    names, computed, _, encoder, _, first, bounds = zip(*lines[3:7], strict=True)
    assert names == ("new clip", "2 frames appended", "moved by 2 frames", "moved by 8 frames")
    assert encoder[0] == bounds[0] == "1.000"
    assert first[0] == "1.000 (1.000 to 1.000)"
    tokens = [tuple(map(int, cell.split(" of "))) for cell in computed]
    assert tokens[1][0] < min(tokens[0][0], tokens[2][0], tokens[3][0])
    assert float(bounds[1]) < float(bounds[2]) < float(bounds[3])
    server, requests, prompts, _, ratios = zip(*lines[10:], strict=True)
    assert set(server) == {"ours"}
    assert requests == names
    assert list(map(int, prompts)) == [total for _, total in tokens]
    assert ratios[0] == first[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_camera_day_reports_tenths(tmp_path):
    arguments = ["--requests", "20", "--seconds", "2", "--logs", str(tmp_path)]
    done = CliRunner().invoke(camera_day.main, arguments, catch_exceptions=False)
    *table, memory = done.output.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2:]]
    assert [number for number, *_ in rows] == list(map(str, range(1, 11)))
    assert [pairs for *_, pairs, _ in rows] == ["33%", *["50%"] * 9]
    assert memory.startswith(f"Memory: first tenth {rows[0][1]} MiB, last tenth {rows[-1][1]} MiB, growth ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small", "qwen2.5-vl-7b"])
def test_random_weights_model_generates(tmp_path, name):
    shape = replace(
        models.SHAPES[name], hidden=64, inner=96, layers=1, heads=2, kv_heads=1, sections=(4, 6, 6),
        vision_width=32, vision_layers=32 if name == "qwen2.5-vl-7b" else 1, vision_heads=2, vision_inner=44,
    )  # fmt: skip
    models.write_model(shape, tmp_path)
    assert image_tokens(tmp_path, 56) == 4


@pytest.mark.slow
def test_random_weights_qwen3_vl_generates(tmp_path):
    shape = replace(
        qwen3_vl.SHAPES["qwen3-vl-4b"], hidden=64, inner=96, layers=3, heads=2, kv_heads=1, vision_width=64,
        vision_inner=96, vision_layers=2, levels=(0,),
    )  # fmt: skip
    qwen3_vl.write_model(shape, tmp_path)
    assert image_tokens(tmp_path, 256) == 64


def test_path_of_a_model_is_absolute(tmp_path, monkeypatch):
    """Other engines run in other folders."""
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert models.checkpoint("model") == tmp_path / "model"


def test_copy_of_a_checkpoint_is_complete_or_missing(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    copy = Path("copy")
    with pytest.raises(AttributeError):
        linked_copy(Path("model"), copy, lambda folder: folder.no_such_attribute)
    assert not copy.exists()
    assert linked_copy(Path("model"), copy, lambda folder: (folder / "more").touch()) == copy
    assert sorted(file.name for file in copy.iterdir()) == ["config.json", "more"]
    assert (copy / "config.json").read_text() == "{}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_formats_reports_file_memory_and_steps(tmp_path):
    folder = to_bfloat16(write_qwen2_5_vl(tmp_path, intermediate_size=2048, num_hidden_layers=2))
    arguments = ["--model", str(folder), "--variants", "int4,awq", "--rounds", "1"]
    done = CliRunner().invoke(formats.main, arguments, catch_exceptions=False)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.output.splitlines()]
    assert [row[0] for row in rows[2:]] == ["bfloat16", "`--quantization int4`", "AWQ"]
    sizes = [float(row[1].removesuffix(" MB")) for row in rows[2:]]
    assert sizes[0] == sizes[1] > sizes[2]
    for _, _, memory, seconds, *steps in rows[3:]:
        assert float(memory.removesuffix(" MB")) > 0
        assert float(seconds.removesuffix(" s")) > 0
        assert len(steps) == 2
        assert all(float(step) > 0 for step in steps)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_documents_measures_a_page(tiny_checkpoint, tmp_path, capsys):
    size = ["--tokens", "4", "--width", "112", "--height", "168"]
    arguments = ["--models", str(tiny_checkpoint), "--engines", "ours", "--rounds", "1", "--logs", str(tmp_path)]
    table = documents.main([*arguments, *size, "--json", str(tmp_path / "raw.json")])
    assert table.notes == []
    (reading,) = table.readings[tiny_checkpoint.name, "ours"]
    assert reading.pages == len(reading.ttft) == 1
    assert 0 < reading.ttft[0] < reading.seconds
    assert reading.prompt_tokens > 112 * 168 / 28**2
    assert reading.peak_bytes > 0
    assert json.loads((tmp_path / "raw.json").read_text())[0]["seconds"] == reading.seconds
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"| {tiny_checkpoint.name} | ours | ")


def test_environment_is_replaced_when_its_packages_change(monkeypatch, tmp_path):
    ran = []

    def run(*command):
        ran.append(command[-1])
        (tmp_path / "name").mkdir(exist_ok=True)

    monkeypatch.setattr(environments, "run", run)
    monkeypatch.setattr(environments, "_python_311", lambda: "python3.11")
    engines = environments.OtherEngines(tmp_path)
    for version in (1, 1, 2):
        engines.environment("name", (f"package=={version}",))
    assert ran == [str(tmp_path / "name"), "package==1", str(tmp_path / "name"), "package==2"]


def test_documents_notes_why_an_engine_ended(monkeypatch, tiny_checkpoint, tmp_path):
    command = (sys.executable, "-c", "import sys; sys.exit('loading\\nout of memory')")
    launch = Launch(name="ours", command=command, note="loads twice")
    monkeypatch.setattr(documents, "_launch", lambda *_: launch)
    arguments = ["--models", str(tiny_checkpoint), "--engines", "ours", "--rounds", "2", "--logs", str(tmp_path)]
    table = documents.main([*arguments, "--width", "112", "--height", "168"])
    failure = f"{tiny_checkpoint.name}, ours: ours ended with 1: loading out of memory"
    assert list(table.lines())[2:] == ["* ours: loads twice", f"* {failure}"]


def test_pooling_compares_with_the_best_other_engine():
    table = Table(base="ours")
    for number, rates in enumerate([(2, 1, 4), (6, 3, 2), (8, 2, 4)]):
        for engine, rate in zip(("ours", "vllm", "openvino"), rates, strict=True):
            table.rates["m", engine, "images"][number] = rate
    assert "* m, images: ours over openvino: 2.00 (0.50 to 3.00)" in list(table.lines())
    assert "| m | vllm | 2, 1 to 3 |  |" in list(table.lines())


STUBBORN = """
import http.server
import os
import signal
import sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGUSR1))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""A server that does not end at SIGTERM, at which it interrupts its parent."""


def test_server_is_killed_if_its_stop_is_interrupted(tmp_path):
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        launch = Launch(name="stubborn", command=(sys.executable, "-c", STUBBORN, "{port}"))
        server = Server(launch, tmp_path / "log")
        with pytest.raises(KeyboardInterrupt):
            server.stop()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert server.resident_bytes() == 0


@cases("number", [signal.SIGTERM, signal.SIGHUP])
def test_engines_end_with_the_benchmark(number):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with end_with_us():
            assert callable(signal.getsignal(number))
            with pytest.raises(SystemExit):
                signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_attacked_server_ends_with_the_benchmark(monkeypatch):
    handlers = []
    monkeypatch.setattr(attacks, "run", lambda *_, **__: handlers.append(signal.getsignal(signal.SIGTERM)))
    attacks.main(["--only", "JSON"])
    assert handlers != [signal.getsignal(signal.SIGTERM)]


@cases(
    ("command", "option", "known"),
    [(formats.main, "--variants", "int8, int4, awq"), (windows.main, "--engines", "ours, ours-int8")],
)
def test_unknown_names_are_reported(command, option, known):
    done = CliRunner().invoke(command, [option, "nf4"])
    assert done.exit_code == 2
    assert f"unknown: nf4; choose from {known}" in " ".join(done.output.split())


@cases(
    ("main", "options", "message"),
    [
        (pooling.main, ["--workloads", "videos"], "unknown: videos; choose from texts, images, pages"),
        (documents.main, ["--engines", "vlm"], "unknown: vlm; choose from ours, "),
        (documents.main, ["--models", "demo,typo"], "There is no model 'typo'."),
        (compare.main, ["--model", "typo"], "There is no model 'typo'."),
        (compare.main, ["--engines", "ours,ours"], "a name is repeated"),
        (compare.main, ["--engine", "vlm"], "'vlm' is neither NAME=COMMAND nor one of ours, "),
        (compare.main, ["--engine", "=--prefill-chunk 64"], " is neither NAME=COMMAND nor one of ours, "),
        (compare.main, ["--engine", "ours=--prefill-chunk 64"], "two engines have the same name"),
    ],
)
def test_names_are_checked_before_the_first_engine_starts(main, options, message, capsys):
    with pytest.raises(SystemExit) as raised:
        main(options)
    assert message in f"{capsys.readouterr().err} {raised.value}"


@cases(("module", "name"), [(lora, "measure"), (speculation, "compare")])
def test_models_of_other_families_are_measured(module, name, monkeypatch, tmp_path_factory):
    folder = write_qwen2_5_vl(tmp_path_factory.mktemp("model"))
    specs = []

    async def measure(*arguments):
        specs.extend(each for each in arguments if isinstance(each, ModelSpec))

    monkeypatch.setattr(module, name, measure)
    CliRunner().invoke(module.main, ["--model", str(folder)], catch_exceptions=False)
    assert [spec.folder for spec in specs] == [folder]


@pytest.mark.slow
def test_mtp_reports_times_by_users_and_acceptance(monkeypatch, tmp_path):
    """Whether drafts pay for so small a model depends on the machine."""
    folder = tiny_qwen3_5.write_checkpoint(tmp_path / "model")
    monkeypatch.setattr(mtp, "RATES", (0.5, 0.9))
    monkeypatch.setattr(mtp, "USERS", (1, 2))
    options = ["--model", str(folder), "--rounds", "1", "--kv-cache-mib", "64"]
    lines = CliRunner().invoke(mtp.main, options, catch_exceptions=False).stdout.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| 0.")]
    assert [(row[0], row[1]) for row in rows] == [("0.5", "1"), ("0.9", "1"), ("0.5", "2"), ("0.9", "2")]
    for row in rows:
        accepted, drafted = map(int, row[4].split(" / "))
        assert 0 <= accepted <= drafted
        assert 0 < float(row[5]) <= int(row[1])  # fewer steps for each user; when users join decides which are shared
    assert mtp.load_plugins().load_spec(mtp.with_head(folder)).text.mtp_layer


def test_unknown_engine_is_not_taken_for_another(tmp_path):
    with pytest.raises(ValueError, match="there is no engine 'vlm'"):
        other_engine("vlm", tmp_path, environments.OtherEngines(tmp_path))


def image_tokens(folder, side):
    """Generate four tokens for an image, and return its number of tokens."""
    content = [workloads.image_part(random.Random(0), side), {"type": "text", "text": "ab cd"}]
    with Engine(EngineConfig(model=str(folder))) as engine:
        request = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "ignore_eos": True}
        usage = engine.chat(request).usage
    assert usage.completion_tokens == 4
    return usage.prompt_tokens_details.image_tokens


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_attacks_reports_what_an_attack_achieves(monkeypatch):
    monkeypatch.setattr(attacks, "KILLS", 5)
    lines = attacks.main(["--only", "MP4: 60,000 edits", "--seconds", "1", "--engine-command", SHORT_DEADLINE])
    rows = [line.split(" | ") for line in "\n".join(lines).splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == ["| none", "| MP4: 60,000 edits", "| all of them, 4 attackers"]
    assert all(row[2].startswith("400 media_too_large (") for row in rows[2:])
    assert lines[-3].startswith("* From a client's disconnect")
    assert lines[-2].endswith("after SIGKILL of all processes that decode media: 200 (5)")
    assert lines[-1].startswith("* From SIGTERM")


PROGRAM = """
from dashinfer_vlm_core.cli.main import main
from dashinfer_vlm_core.config import EngineConfig, Limits
EngineConfig.model_fields["limits"].default = Limits(video_decode_timeout=2)
EngineConfig.model_rebuild(force=True)
main()
"""
SHORT_DEADLINE = (
    f"{shlex.quote(sys.executable)} -c {shlex.quote(PROGRAM)} serve {attacks.default_command().partition(' serve ')[2]}"
)


@pytest.mark.slow
def test_every_attack_is_a_request():
    """Their bodies have hundreds of megabytes."""
    found = attacks.attacks()
    assert {attack.rule for attack in found} == {23, 24, 25, 27, 28, 30, 31, 32, 41}
    for attack in found:
        assert attack.request("key").startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")


def test_limits_match_model_shape():
    """Counted by hand for `small`, in 1e9 operations and bytes: 24 layers of 14.9 M weights, output layer of 136 M."""
    rotary = RotarySpec(theta=1e6, axes=(0,) * 8 + (1,) * 12 + (2,) * 12)
    attention = AttentionSpec(num_heads=14, num_kv_heads=2, head_dim=64, rotary=rotary, bias=True)
    text = TextModelSpec(
        hidden_size=896, layers=(LayerSpec(mixer=attention, mlp=MlpSpec(intermediate_size=4864)),) * 24,
        vocab_size=151_936, max_position_embeddings=32_768, norm_eps=1e-6, tie_word_embeddings=True,
    )  # fmt: skip
    vision = VisionConfig(
        depth=16, hidden_size=640, intermediate_size=2560, output_size=896, num_heads=8, patch_size=14,
        temporal_patch_size=2, spatial_merge_size=2, hidden_act="quick_gelu",
    )  # fmt: skip
    assert limits.qwen2_vision_flop(vision, 1024) / 1e9 == pytest.approx(210.1, abs=0.1)
    windowed = Qwen25VLVisionConfig(
        depth=32, hidden_size=1280, intermediate_size=3420, output_size=2048, num_heads=16, patch_size=14,
        temporal_patch_size=2, spatial_merge_size=2, hidden_act="silu", window=4,
        fullatt_block_indexes=frozenset({7, 15, 23, 31}), tokens_per_second=2,
    )  # fmt: skip
    assert limits.qwen2_5_vision_flop(windowed, 1024) / 1e9 == pytest.approx(1342.9, abs=0.1)
    deepstack = Qwen3VLVisionConfig(
        depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16, output_size=2048, patch_size=16,
        temporal_patch_size=2, spatial_merge_size=2, table_side=48, hidden_act="gelu_pytorch_tanh",
        deepstack_layers=(5, 11, 17),
    )  # fmt: skip
    assert limits.qwen3_vision_flop(deepstack, 784) / 1e9 == pytest.approx(575.9, abs=0.1)
    assert limits.step_bytes(text, packed=False) / 1e9 == pytest.approx(0.988, abs=0.001)
    assert limits.step_bytes(text, packed=True) / 1e9 == pytest.approx(0.673, abs=0.001)
    assert limits.prefill_flop(text, 296) / 1e9 == pytest.approx(216, abs=0.5)


def test_limits_of_mixture_count_experts_of_one_token():
    """Counted by hand for Qwen3-VL-30B-A3B: 48 layers of 56.9 M weights that compute a token, output layer of 311 M."""
    rotary = RotarySpec(theta=5e6, axes=(0,) * 64)
    attention = AttentionSpec(num_heads=32, num_kv_heads=4, head_dim=128, rotary=rotary, head_norms=True)
    experts = ExpertsSpec(num_experts=128, experts_per_token=8, intermediate_size=768)
    text = TextModelSpec(
        hidden_size=2048, layers=(LayerSpec(mixer=attention, mlp=experts),) * 48,
        vocab_size=151_936, max_position_embeddings=262_144, norm_eps=1e-6, tie_word_embeddings=False,
    )  # fmt: skip
    assert limits.step_bytes(text, packed=False) / 1e9 == pytest.approx(6.083, abs=0.001)


@pytest.mark.slow
def test_limits_count_the_matrices_of_gated_delta_nets(tmp_path):
    shape = replace(
        qwen3_5.SHAPES["qwen3.5-0.8b"], hidden=64, inner=96, layers=4, heads=2, kv_heads=1, head_dim=32,
        sections=(2, 1, 1), key_heads=2, value_heads=4, value_dim=16, vision_width=48, vision_inner=96, vision_layers=1,
    )  # fmt: skip
    qwen3_5.write_model(shape, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    counts = [weight.numel() for name, weight in weights.items() if ".layers." in name and weight.ndim == 2]
    assert count_layer_weights(limits.load_spec(tmp_path).text) == sum(counts)
    assert limits.vision_flop(tmp_path, 64) > 0


def test_model_table_of_page_is_current():
    assert f"\n{model_table()}\n" in page_text("models.md"), "run python -m benchmarks.model_table"


def test_model_table_counts_published_parameters():
    """In 1e9; the names of the models contain them, rounded."""
    counts = {name: round(count_weights(model) / 1e9, 1) for name, model in MODELS.items()}
    assert counts == {
        "Qwen2-VL-2B": 2.2, "Qwen2-VL-7B": 8.3, "Qwen2-VL-72B": 73.4,
        "Qwen2.5-VL-3B": 3.8, "Qwen2.5-VL-7B": 8.3, "Qwen2.5-VL-32B": 33.5, "Qwen2.5-VL-72B": 73.4,
        "Qwen3-VL-2B": 2.1, "Qwen3-VL-4B": 4.4, "Qwen3-VL-8B": 8.8, "Qwen3-VL-32B": 33.4,
        "Qwen3-VL-30B-A3B": 31.1, "Qwen3-VL-235B-A22B": 235.7,
        "Qwen3.5-0.8B": 0.9, "Qwen3.5-2B": 2.2, "Qwen3.5-4B": 4.5, "Qwen3.5-9B": 9.4, "Qwen3.5-27B": 27.4,
        "Qwen3.5-35B-A3B": 35.1, "Qwen3.5-122B-A10B": 122.6, "Qwen3.5-397B-A17B": 396.8,
    }  # fmt: skip


def test_model_table_equals_measured_sizes():
    """Of `2b` in docs/lab/quantization.md: bfloat16, `--quantization int8`, AWQ with `--quantization int8`."""
    model = MODELS["Qwen2-VL-2B"]
    assert [loaded_bytes(model, stored.memory) / 1e6 for stored in FORMATS] == pytest.approx(
        [4081, 2688, 2102], rel=0.03
    )
    assert [disk_bytes(model, stored) / 1e6 for stored in FORMATS] == pytest.approx([4418, 3109, 2478], rel=0.005)
    assert sum(step_bytes(model.text, FORMATS[0].memory)) == limits.step_bytes(model.text, packed=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "side"), [(write_qwen2_5_vl, 168), (tiny_qwen3.write_checkpoint, 192)], ids=["qwen2_5_vl", "qwen3_vl"]
)
def test_limits_of_checkpoint_count_each_weight(tmp_path, write, side):
    """Without attention, each weight of a layer multiplies each of its rows once."""
    folder = write(tmp_path)
    spec = limits.load_spec(folder)
    patches = limits.image_patches(folder)
    assert patches == (side // spec.pixels.patch_size) ** 2
    linear = 0
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "visual." in name and tensor.ndim > 1 and "pos_embed" not in name:
            linear += 2 * tensor.numel() * (patches // 4 if "merger" in name else patches)
    flop = limits.vision_flop(folder, patches)
    assert linear < flop < linear + 4 * 4 * patches**2 * 32 + 1  # four blocks of width 32
    rates = limits.Rates(read_gb_s=1.0, bf16_gflop_s=1.0, kernels="torch")
    expected = flop / 1e9 + limits.prefill_flop(spec.text, 50) / 1e9
    assert limits.image_seconds(folder, rates, prompt=50) == pytest.approx(expected)


def test_ratios_are_computed_per_round():
    results = Results(model="m", base="ours")
    row = Row("fresh-1", "new images", "TTFT, s")
    for number, (ours, theirs) in enumerate([(1, 2), (10, 10), (30, 10)]):
        results.add(row, "ours", number, ours)
        results.add(row, "theirs", number, theirs)
    assert results.ratio(row, "theirs") == Ratio(1.0, 0.5, 3.0)
    assert results.middle(row, "ours") == 10


def test_run_with_short_completion_is_reported_and_excluded():
    sample = Sample(requested_tokens=8, sent=0.0, arrivals=[1.0], tokens=7, fault="7 tokens instead of 8")
    results = Results(model="m", base="ours")
    results.keep("theirs", "fresh-1", 0, Run(samples=[sample], seconds=1.0, background=[]))
    assert "1 of 1 responses failed" in results.notes[0]


def test_engines_get_equal_requests_that_differ_per_round():
    work = workloads.workloads()["repeated-8"]
    assert work.content("0 repeated-8") == work.content("0 repeated-8")
    pictures = [str(talk.turns[0][0]) for seed in "01" for talk in work.content(f"{seed} repeated-8")[0]]
    assert len(set(pictures)) == 4


@cases(
    ("options", "message"),
    [
        (["--frames", "31"], "--frames': must be even"),
        (["--frames", "0"], "--frames': 0 is not in the range x>=2"),
        (["--rounds", "0"], "--rounds': 0 is not in the range x>=1"),
    ],
)
def test_numbers_of_windows_are_checked(options, message):
    done = CliRunner().invoke(windows.main, options)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


@dataclass
class Endpoint:
    """A server with two processes, which need a quarter and half a second between two looks at them."""

    name: str
    base: str
    api_key: str = ""
    cpu: float = 0.0

    def cpu_seconds(self):
        self.cpu += 0.25
        return {"python": self.cpu, "worker": 2 * self.cpu}


@pytest.mark.slow
def test_overhead_is_measured_by_request_and_chunk(tiny_checkpoint):
    kinds = overhead.loads(requests=4, tokens=4, users=2)
    engine = scripted_engine("a b c d", model=str(tiny_checkpoint), served_model_name=overhead.MODEL)
    with engine, serving(engine) as server:
        endpoints = [Endpoint(name, f"{server.url}/v1") for name in ("direct", "router")]
        outcomes = asyncio.run(overhead.measure(endpoints, kinds, rounds=2))
        missing = Endpoint("router", f"{server.url}/v2")
        with pytest.raises(RuntimeError, match="router: HTTP 404"):
            asyncio.run(overhead.measure([missing], kinds, rounds=1))
    assert {key: len(outcome.seconds) for key, outcome in outcomes.items()} == {
        (name, kind): 2 * load.requests for name in ("direct", "router") for kind, load in kinds.items()
    }
    whole, first, stream = (outcomes["router", name] for name in ("whole", "first", "stream"))
    assert stream.events_per_request - first.events_per_request == 3
    assert (whole.events_per_request, whole.cpu_ms) == (1, 1e3 * 2 * 0.75 / 8)
    rows = dict(line.strip("| ").split(" | ", 1) for line in overhead.table(["direct", "router"], outcomes)[2:])
    assert rows["CPU, one token, not streamed, ms"] == "187.50 | 187.50"
    per_chunk = (1e3 * 2 * 0.75 / 2 - 1e3 * 2 * 0.75 / 8) / 3
    assert rows["CPU, each further chunk, ms"] == f"{per_chunk:.2f} | {per_chunk:.2f}"


def test_row_of_estimates_has_ratios_to_measurements():
    estimate = MemoryEstimate(
        weights=1_500_000_000, kv_cache=1, vision_cache=1, process=300_000_000, step=FormatBytes(wide=10**9), layers=10,
        delta_nets=0, kernels="torch", cost=StepCost(slowdown=2, layer_seconds=1e-3, delta_net_seconds=0),
    )  # fmt: skip
    found = Measurement(
        memory=2 * 10**9, estimate=estimate, cached=10**8, bandwidth=40e9, rates={}, text_rate=20, image_rate=10
    )
    assert list(found.cells()) == ["2,000", "1,900", "0.95", "20.0", "10.0", "16.7", "0.83", "1.67"]
