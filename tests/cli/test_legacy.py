"""`dashinfer_vlm_serve`: a test for each flag of the old command."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dashinfer_vlm_cli import legacy
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_server.plugin import serve
from tests.cli.conftest import process

SERVER_OPTIONS = {flag for param in serve.params for flag in (*param.opts, *param.secondary_opts)}

ROWS = [
    ("--model", "maker/model", ["--model", "maker/model"]),
    ("--host", "0.0.0.0", ["--host", "0.0.0.0"]),
    ("--port", "9000", ["--port", "9000"]),
    ("--vision_engine", "tensorrt", []),
    ("--device", "cuda", ["--device", "cuda"]),
    ("--max_length", "32000", ["--max-model-len", "32000"]),
    ("--max_batch", "128", ["--max-batch-size", "128"]),
    ("--parallel_size", "2", ["--tensor-parallel", "2"]),
    ("--enable-prefix-cache", None, ["--prefix-cache"]),
    ("--fp8", None, "FP8 .* is not available. Use `--quantization int8`"),
    ("--quant-type", "a16w8", ["--quantization", "int8"]),
    ("--dtype", "float16", ["--dtype", "float16"]),
    ("--min-pixels", "3136", ["--min-pixels", "3136"]),
    ("--max-pixels", "12845056", ["--max-pixels", "12845056"]),
    ("--api-keys", "one,two", ["--api-key", "one", "--api-key", "two"]),
    ("--ssl", None, "wants the variables SSL_KEYFILE and SSL_CERTFILE"),
    ("--allowed-origins", '["https://a.example", "*"]', ["--allowed-origins", "https://a.example,*"]),
    ("--allow-credentials", None, []),
    ("--allowed-methods", '["GET"]', []),
    ("--allowed-headers", '["*"]', []),
]  # fmt: skip


@pytest.fixture
def translated(capsys, monkeypatch):
    """What `dashinfer-vlm serve` is called with; `translated.told()` is what the person is told."""

    def translated(*words, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        named = "--model" in words
        given = words if named else ("--model", "demo", *words)
        with legacy.serve.make_context("dashinfer_vlm_serve", list(given)) as context:
            passed = [*legacy.translated(context.params), *context.params["new"]]
        return passed if named else passed[2:]

    translated.told = lambda: capsys.readouterr().err
    return translated


def test_each_flag_has_a_row():
    assert [row[0] for row in ROWS] == [flag.flag for flag in legacy.FLAGS]


@pytest.mark.parametrize(("flag", "value", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_each_flag_is_mapped_or_answered(translated, flag, value, expected):
    words = [flag] if value is None else [flag, value]
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            translated(*words)
    else:
        assert translated(*words) == expected
        assert expected or f"{flag}: no effect; " in translated.told()


@pytest.mark.parametrize(("flag", "value", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_dashes_and_underscores_are_the_same(translated, flag, value, expected):
    if isinstance(expected, list):
        other = "--" + flag[2:].translate(str.maketrans("-_", "_-"))
        words = [other] if value is None else [other, value]
        assert translated(*words) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("a8w8", ["--quantization", "int8"]),
        ("a16w4", ["--quantization", "uint4"]),
        ("gptq", "Name the unquantised one"),
        ("gptq_weight_only", "Name the unquantised one"),
        ("fp8", "FP8 .* is not available"),
    ],
)
def test_each_kind_of_quantisation(translated, kind, expected):
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            translated("--quant-type", kind)
    else:
        assert translated("--quant-type", kind) == expected


def test_tls_comes_from_the_old_variables(translated):
    files = {"SSL_KEYFILE": "key.pem", "SSL_CERTFILE": "cert.pem"}
    assert translated("--ssl", **files) == ["--ssl-keyfile", "key.pem", "--ssl-certfile", "cert.pem"]
    assert translated(**files) == []


@pytest.mark.parametrize("origins", ["*", "{}", "[1]"])
def test_origins_that_are_no_list_are_refused(translated, origins):
    with pytest.raises(ConfigError, match="`--allowed-origins` is a list in JSON"):
        translated("--allowed-origins", origins)


def test_new_flags_are_taken_beside_the_old(translated):
    assert translated("--max_batch", "4", "--video-fps", "1", "--no-prefix-cache") == [
        "--max-batch-size", "4", "--video-fps", "1", "--no-prefix-cache",
    ]  # fmt: skip


def test_a_model_has_to_be_named_as_before():
    refused = CliRunner().invoke(legacy.serve, [])
    assert refused.exit_code == 2
    assert "--model" in refused.output


@pytest.mark.parametrize(
    ("flag", "words"),
    [(flag, words) for flag, _, words in ROWS if isinstance(words, list)]
    + [("--ssl", ["--ssl-keyfile", "--ssl-certfile"])],
)
def test_what_they_are_mapped_to_are_options_of_the_server(flag, words):
    assert {word for word in words if word.startswith("--")} <= SERVER_OPTIONS


@pytest.mark.slow
def test_the_server_runs_under_the_old_flags(tiny_checkpoint):
    program = "from dashinfer_vlm_cli.legacy import main; main()"
    ended = process("--model", tiny_checkpoint, "--max_batch", "0", program=program)
    assert ended.returncode == 2
    assert "max_batch_size" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert (
        f"dashinfer_vlm_serve is now: dashinfer-vlm serve --model {tiny_checkpoint} --max-batch-size 0" in ended.stderr
    )
    ended = process("--model", "demo", "--api-keys", "hush", "--port", "x", program=program)
    assert "hush" not in ended.stderr
    ended = process("--model", tiny_checkpoint, "--fp8", program=program)
    assert (ended.returncode, ended.stderr.startswith("dashinfer-vlm: FP8")) == (2, True)


def test_the_table_of_the_page_is_this_one():
    from tests.pages import page_text

    assert "\n".join(legacy.table()) in page_text("cli.md")
