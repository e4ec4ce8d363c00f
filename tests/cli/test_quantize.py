"""`quantize`: options, output and the report; tests/core/test_checkpoint_quantizer.py tests the weights."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import click
import pytest
import torch
import torch.nn.functional as F

from dashinfer_vlm_cli.accuracy import AccuracyReport, RequestAccuracy, compare_logits, measure_accuracy
from dashinfer_vlm_cli.batch_files import read_entries
from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import CheckpointError, ConfigError
from dashinfer_vlm_core.plugins import load_plugins
from tests.dequantizer import write_dequantized
from tests.tiny import to_bfloat16, write_checkpoint

IMAGE = Path(__file__).parents[2] / "examples" / "pictures" / "circle.png"


def data_url(path):
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return to_bfloat16(write_checkpoint(tmp_path_factory.mktemp("original"), num_hidden_layers=3))


@pytest.fixture
def data(tmp_path):
    """Requests with text and images, of which the third one is invalid for the model."""
    path = tmp_path / "data.jsonl"
    picture = {"type": "image_url", "image_url": {"url": data_url(IMAGE)}}
    bodies = [
        {"messages": [{"role": "user", "content": "Hello"}], "model": "another", "max_tokens": 3, "n": 2},
        {"messages": [{"role": "user", "content": [picture, {"type": "text", "text": "Describe the picture."}]}]},
        {"messages": [{"role": "user", "content": "Hello"}], "repetition_penalty": -1},
    ]  # fmt: skip
    lines = [
        {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_output_states_sizes_and_files_not_copied(run, original, tmp_path):
    result = run("quantize", original, tmp_path / "out", "--to", "int4")
    assert f"{tmp_path / 'out'}: 21 matrices quantized, " in result.stdout
    assert "Not copied" not in result.stderr
    assert (tmp_path / "out" / "config.json").exists()


def test_json_output(run, original, tmp_path):
    output = json.loads(run("quantize", original, "--to", "int8", tmp_path / "out", "--json").stdout)
    assert (output["folder"], output["num_quantized"], output["accuracy"]) == (str(tmp_path / "out"), 21, None)
    assert output["quantized_bytes"] < output["original_bytes"]


def test_group_size_is_written(run, original, tmp_path):
    run("quantize", original, tmp_path / "out", "--to", "int4", "--group-size", "32")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["config_groups"]["group_1"]["weights"]["group_size"] == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "int8", "--group-size", "64"), "`--group-size` requires `--to int4`"),
        (("--to", "int4", "--model", "demo"), "The model is given twice"),
        (("--to", "int3"), "'int3' is not one of 'int4', 'int8'"),
        ((), "Missing option '--to'"),
    ],
)
def test_contradicting_options_are_usage_errors(run, original, tmp_path, arguments, message):
    result = run("quantize", original, tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert message in click.unstyle(result.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "param"),
    [(("--quantization", "int8"), "quantization"), (("--decoder", "dashinfer"), "decoder")],
)
def test_engine_options_that_do_not_apply_are_rejected(run, original, tmp_path, arguments, param):
    with pytest.raises(ConfigError) as caught:
        run("quantize", original, tmp_path / "out", "--to", "int4", *arguments)
    assert caught.value.param == param


def test_invalid_data_is_found_before_writing(run, original, tmp_path):
    (tmp_path / "data.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="line 1 has no custom_id"):
        run("quantize", original, tmp_path / "out", "--to", "int4", "--data", tmp_path / "data.jsonl")
    (tmp_path / "data.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no requests"):
        run("quantize", original, tmp_path / "out", "--to", "int4", "--data", tmp_path / "data.jsonl")
    assert not (tmp_path / "out").exists()


def test_compared_logits():
    original, quantized = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))
    quantized[2] = original[2]
    compared = compare_logits("id", original.numpy(), quantized.numpy())
    kl = F.kl_div(quantized.log_softmax(1), original.log_softmax(1), log_target=True, reduction="sum") / 5
    equal = original.argmax(1) == quantized.argmax(1)
    assert compared.mean_kl == pytest.approx(float(kl), rel=1e-5)
    assert compared.max_logit_difference == pytest.approx(float((original - quantized).abs().max()))
    assert (compared.tokens, compared.equal_tokens) == (5, int(equal.sum()))
    assert compared.first_difference == equal.tolist().index(False)
    same = compare_logits("id", original.numpy(), original.numpy())
    assert (same.equal_tokens, same.first_difference, same.mean_kl, same.max_logit_difference) == (5, None, 0, 0)


def measure(original, data, tmp_path, **options):
    """Compare a model with itself, with `options` for the second engine."""
    config = {"model": str(original), "device": "cpu", "cpu_kernels": "torch"}
    return measure_accuracy(
        data,
        read_entries(data),
        original=lambda: Engine(EngineConfig(**config)),
        quantized=lambda: Engine(EngineConfig(**config | options)),
        max_tokens=6,
        folder=tmp_path,
    )


def test_report_of_quantized_model(original, data, tmp_path):
    """The reference for all values is the engine's interface."""
    report = measure(original, data, tmp_path, quantization="int4", vision_quantization="none")
    text, image, failed = report.requests
    assert [request.custom_id for request in report.requests] == ["request-0", "request-1", "request-2"]
    assert "repetition_penalty" in failed.error
    assert (text.tokens, image.tokens) == (6, 6)
    assert min(text.mean_kl, image.mean_kl, text.max_logit_difference) > 0
    config = EngineConfig(model=str(original), device="cpu", cpu_kernels="torch")
    body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 6}
    logits = []
    with Engine(config) as engine:
        token_ids = engine.submit(body).result().token_ids[0]
        logits.append(engine.logits(body, token_ids))
    assert logits[0].argmax(axis=1).tolist() == list(token_ids)
    quantized = config.model_copy(update={"quantization": "int4", "vision_quantization": "none"})
    with Engine(quantized) as engine:
        logits.append(engine.logits(body, token_ids))
    assert compare_logits("request-0", *logits) == text
    totals = report.as_json()
    assert (totals["num_requests"], totals["num_failed"], totals["tokens"]) == (2, 1, 12)
    assert totals["mean_kl"] == pytest.approx((text.mean_kl + image.mean_kl) / 2)
    assert json.loads(json.dumps(totals))["requests"][2]["error"] == failed.error


def test_report_of_identical_models(original, data, tmp_path):
    totals = measure(original, data, tmp_path).as_json()
    assert (totals["equal_tokens"], totals["equal_completions"]) == (12, 2)
    assert (totals["mean_kl"], totals["max_logit_difference"]) == (0, 0)


def test_report_without_comparable_requests():
    report = AccuracyReport(requests=(RequestAccuracy(custom_id="a", error="No."),))
    totals = report.as_json()
    assert (totals["num_requests"], totals["num_failed"], totals["mean_kl"]) == (0, 1, None)


@pytest.fixture
def reads_compressed_tensors(run, original, tmp_path):
    """Skip unless the engine loads checkpoints in this format."""
    run("quantize", original, tmp_path / "probe", "--to", "int8")
    try:
        load_plugins().family_of(tmp_path / "probe").load_spec(tmp_path / "probe")
    except CheckpointError as error:
        pytest.skip(error.message)


@pytest.mark.usefixtures("reads_compressed_tensors")
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_report_is_printed_and_written(run, original, data, tmp_path, precision):
    arguments = ("--to", precision, "--data", data, "--max-tokens", 4, "--device", "cpu", "--cpu-kernels", "torch")
    result = run("quantize", original, tmp_path / "out", *arguments)
    assert result.exit_code == 0
    written = json.loads((tmp_path / "out" / "accuracy.json").read_text())
    assert (written["num_requests"], written["num_failed"], written["tokens"]) == (2, 1, 8)
    assert written["mean_kl"] > 0
    for row in written["requests"][:2]:
        cells = f"{row['equal_tokens']}/4", f"{row['mean_kl']:.2e}", f"{row['max_logit_difference']:.3f}"
        line = next(line for line in result.stdout.splitlines() if line.startswith(row["custom_id"]))
        assert line.split() == [row["custom_id"], *cells]
    assert f"{written['equal_tokens'] / 8:.1%} of 8 tokens are equal" in result.stdout
    assert "request-2 failed: " in result.stderr


@pytest.mark.usefixtures("reads_compressed_tensors")
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_engine_computes_with_dequantized_weights(run, original, tmp_path, precision):
    run("quantize", original, tmp_path / "out", "--to", precision)
    write_dequantized(tmp_path / "out", tmp_path / "dequantized")
    body = {"messages": [{"role": "user", "content": "the the"}]}
    logits = []
    for model in ("out", "dequantized"):
        options = {"dtype": "float32", "device": "cpu", "cpu_kernels": "torch"}
        with Engine(EngineConfig(model=str(tmp_path / model), **options)) as engine:
            logits.append(engine.logits(body, (5, 6, 7, 8)))
    assert (logits[0] == logits[1]).all()
