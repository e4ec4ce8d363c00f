"""`dashinfer_vlm_serve`: the translation of each flag of the old command."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from dashinfer_vlm_cli import legacy
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_server.plugin import serve
from tests.cases import cases
from tests.cli.conftest import run_process
from tests.pages import page_text

SERVER_OPTIONS = {
    flag for param in serve.get_params(click.Context(serve)) for flag in (*param.opts, *param.secondary_opts)
}

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
    ("--fp8", None, "cannot be quantized to FP8 .* Use `--quantization int8`"),
    ("--quant-type", "a16w8", ["--quantization", "int8"]),
    ("--dtype", "float16", ["--dtype", "float16"]),
    ("--min-pixels", "3136", ["--min-pixels", "3136"]),
    ("--max-pixels", "12845056", ["--max-pixels", "12845056"]),
    ("--api-keys", "one,two", ["--api-key", "one", "--api-key", "two"]),
    ("--ssl", None, "requires the environment variables SSL_KEYFILE and SSL_CERTFILE"),
    ("--allowed-origins", '["https://a.example", "*"]', ["--allowed-origins", "https://a.example,*"]),
    ("--allow-credentials", None, []),
    ("--allowed-methods", '["GET"]', []),
    ("--allowed-headers", '["*"]', []),
]  # fmt: skip


@pytest.fixture
def translate(capsys, monkeypatch):
    """Return the arguments of `dashinfer-vlm serve`; `translate.messages()` returns the messages for the user."""

    def translate(*words, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        named = "--model" in words
        given = words if named else ("--model", "demo", *words)
        with legacy.serve.make_context("dashinfer_vlm_serve", list(given)) as context:
            args = [*legacy.translate_flags(context.params), *context.params["new"]]
        return args if named else args[2:]

    translate.messages = lambda: capsys.readouterr().err
    return translate


def test_every_flag_is_tested():
    assert [row[0] for row in ROWS] == [flag.flag for flag in legacy.FLAGS]


@pytest.mark.parametrize(("flag", "value", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_flag_is_translated_or_rejected(translate, flag, value, expected):
    words = [flag] if value is None else [flag, value]
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            translate(*words)
    else:
        assert translate(*words) == expected
        assert expected or f"{flag}: no effect: " in translate.messages()


@pytest.mark.parametrize(("flag", "value", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_dashes_and_underscores_are_equivalent(translate, flag, value, expected):
    if isinstance(expected, list):
        other = "--" + flag[2:].translate(str.maketrans("-_", "_-"))
        words = [other] if value is None else [other, value]
        assert translate(*words) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("a8w8", ["--quantization", "int8"]),
        ("a16w4", ["--quantization", "int4"]),
        ("gptq", []),
        ("gptq_weight_only", []),
        ("fp8", "cannot be quantized to FP8"),
    ],
)
def test_quant_type_is_translated_or_rejected(translate, kind, expected):
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            translate("--quant-type", kind)
    else:
        assert translate("--quant-type", kind) == expected


def test_ssl_flag_reads_environment_variables(translate):
    files = {"SSL_KEYFILE": "key.pem", "SSL_CERTFILE": "cert.pem"}
    assert translate("--ssl", **files) == ["--ssl-keyfile", "key.pem", "--ssl-certfile", "cert.pem"]
    assert translate(**files) == []


@pytest.mark.parametrize("origins", ["*", "{}", "[1]"])
def test_allowed_origins_must_be_json_list(translate, origins):
    with pytest.raises(ConfigError, match="`--allowed-origins` must be a JSON list"):
        translate("--allowed-origins", origins)


def test_new_options_are_passed_through(translate):
    assert translate("--max_batch", "4", "--video-fps", "1", "--no-prefix-cache") == [
        "--max-batch-size", "4", "--video-fps", "1", "--no-prefix-cache",
    ]  # fmt: skip


def test_model_is_required():
    refused = CliRunner().invoke(legacy.serve, [])
    assert refused.exit_code == 2
    assert "--model" in refused.output


@cases(
    ("flag", "words"),
    [(flag, words) for flag, _, words in ROWS if isinstance(words, list)]
    + [("--ssl", ["--ssl-keyfile", "--ssl-certfile"])],
)
def test_translations_are_options_of_serve(flag, words):
    assert {word for word in words if word.startswith("--")} <= SERVER_OPTIONS


@pytest.mark.slow
def test_server_starts_with_old_flags(tiny_checkpoint):
    program = "from dashinfer_vlm_cli.legacy import main; main()"
    result = run_process("--model", tiny_checkpoint, "--max_batch", "0", program=program)
    assert result.returncode == 2
    assert "max_batch_size" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert (
        f"dashinfer_vlm_serve is now: dashinfer-vlm serve --model {tiny_checkpoint} --max-batch-size 0" in result.stderr
    )
    for words in (("--api-keys", "hush"), ("--api-key=hush",)):
        result = run_process("--model", "demo", *words, "--port", "x", program=program)
        assert "..." in result.stderr
        assert "hush" not in result.stderr
    result = run_process("--model", tiny_checkpoint, "--fp8", program=program)
    assert (result.returncode, result.stderr.startswith("dashinfer-vlm: Weights")) == (2, True)


def test_docs_contain_flag_table():
    old = [f"{flag.flag} {flag.metavar.replace('|', ' ')}".strip() for flag in legacy.FLAGS]
    rows = [f"| `{written}` | {flag.replacement} |" for written, flag in zip(old, legacy.FLAGS, strict=True)]
    assert "\n".join(rows) in page_text("cli.md")
