"""`dashinfer_vlm_serve`: the command of the DashInfer-VLM toolkit. It translates the flags for `dashinfer-vlm serve`.

It accepts the flags of all versions (2.0 to 2.6, and later commits of the repository).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click

from dashinfer_vlm_core.cli.main import cli, run
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.plugins import add_commands


@dataclass(frozen=True, slots=True)
class OldFlag:
    """A flag of the old command.

    Attributes:
        flag: the documented spelling; `_` and `-` are equivalent.
        metavar: its value, or its choices separated by `|`; empty for a switch.
        replacement: what to use instead, for the documentation.
        new: the flag of `serve` with the same value, or a function that returns the arguments of `serve` for a value;
            empty if the flag has no effect, which `replacement` explains.
    """

    flag: str
    metavar: str
    replacement: str
    new: str | Callable[[str], list[str]] = ""

    @property
    def name(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")


def _translate_quant_type(kind: str) -> list[str]:
    if kind == "fp8":
        return _reject_fp8(kind)
    if kind == "a8w8":
        _show_note("--quant-type", "only weights are quantized, not activations")
    if kind in ("a16w8", "a8w8"):
        return ["--quantization", "int8"]
    if kind == "a16w4":
        return ["--quantization", "int4"]
    _show_note("--quant-type", GPTQ_IS_DETECTED)
    return []


def _reject_fp8(_: str) -> list[str]:
    raise ConfigError(
        "Weights cannot be quantized to FP8 (`--fp8`, `--quant-type fp8`). Use `--quantization int8`, which needs the"
        " same memory, or leave it out. FP8 checkpoints need no option.",
        param="fp8",
    )


def _translate_keys(keys: str) -> list[str]:
    return [arg for key in keys.split(",") if key for arg in ("--api-key", key)]


def _translate_origins(text: str) -> list[str]:
    try:
        origins = json.loads(text)
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
        raise ConfigError("`--allowed-origins` must be a JSON list, such as '[\"https://example.com\"]'.")
    return ["--allowed-origins", ",".join(origins)]


def _translate_tls(_: str) -> list[str]:
    parameters = click.get_current_context().params
    key = parameters["old_keyfile"]
    certificate = parameters["old_certfile"]
    if not key or not certificate:
        raise ConfigError(
            "`--ssl` requires the environment variables SSL_KEYFILE and SSL_CERTFILE. Set them, or use `--ssl-keyfile`"
            " and `--ssl-certfile` instead.",
            param="ssl",
        )
    return ["--ssl-keyfile", key, "--ssl-certfile", certificate]


API_KEY = ("--api-key", "--api_key")
GPTQ_IS_DETECTED = "no effect, GPTQ checkpoints are recognized from their config.json"
QUANT_TYPES = "gptq|gptq_weight_only|a8w8|a16w4|a16w8|fp8"
QUANTIZATIONS = (
    "`a16w8` and `a8w8`: `--quantization int8`; `a16w4`: `--quantization int4`; `fp8`: rejected; others:"
    f" {GPTQ_IS_DETECTED}"
)
MAX_PIXELS = "`--max-pixels`; defaults to the pixels of 1280 tokens, not of 16384"
PREFIX_CACHE = "`--prefix-cache`; enabled by default, `--no-prefix-cache` disables it"
TLS = "`--ssl-keyfile` and `--ssl-certfile`; this command reads SSL_KEYFILE and SSL_CERTFILE"
VISION_ENGINE = "no effect: the vision encoder is this package's, in PyTorch"

FLAGS = (
    OldFlag("--model", "TEXT", "`--model`; model IDs refer to Hugging Face", "--model"),
    OldFlag("--host", "TEXT", "`--host`", "--host"),
    OldFlag("--port", "INT", "`--port`", "--port"),
    OldFlag("--vision_engine", "tensorrt|transformers", VISION_ENGINE),
    OldFlag("--device", "TEXT", "`--device`", "--device"),
    OldFlag("--max_length", "INT", "`--max-model-len`; defaults to the checkpoint's, not 32000", "--max-model-len"),
    OldFlag("--max_batch", "INT", "`--max-batch-size`; defaults to 32, not 128", "--max-batch-size"),
    OldFlag("--parallel_size", "INT", "`--tensor-parallel`", "--tensor-parallel"),
    OldFlag("--enable-prefix-cache", "", PREFIX_CACHE, "--prefix-cache"),
    OldFlag("--fp8", "", "rejected: use `--quantization int8`", _reject_fp8),
    OldFlag("--quant-type", QUANT_TYPES, QUANTIZATIONS, _translate_quant_type),
    OldFlag("--dtype", "bfloat16|float16|float32", "`--dtype`; defaults to the checkpoint's", "--dtype"),
    OldFlag("--min-pixels", "INT", "`--min-pixels`", "--min-pixels"),
    OldFlag("--max-pixels", "INT", MAX_PIXELS, "--max-pixels"),
    OldFlag("--api-keys", "KEY,KEY", "`--api-key`, once per key; `--api-key-file` is safer", _translate_keys),
    OldFlag("--ssl", "", TLS, _translate_tls),
    OldFlag("--allowed-origins", "JSON", "`--allowed-origins`, separated by commas; defaults to none, not all",
            _translate_origins),
    OldFlag("--allow-credentials", "", "no effect: pages send the key in the `Authorization` header"),
    OldFlag("--allowed-methods", "JSON", "no effect: all supported methods are allowed"),
    OldFlag("--allowed-headers", "JSON", "no effect: all supported headers are allowed"),
)  # fmt: skip
"""All flags of the old command. docs/cli.md contains the same table."""


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "ignore_unknown_options": True,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    }
)
@click.option("--old-keyfile", envvar="SSL_KEYFILE", hidden=True)
@click.option("--old-certfile", envvar="SSL_CERTFILE", hidden=True)
@click.argument("new", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF dashinfer-vlm serve]")
def serve(*, new: tuple[str, ...], **given: str | bool | None) -> None:
    """Serve a model with the flags of the DashInfer-VLM toolkit.

    The flags are translated for `dashinfer-vlm serve`, whose own options are accepted too.
    """
    args = [*translate_flags(given), *new]
    click.echo(f"dashinfer_vlm_serve is now: dashinfer-vlm serve {' '.join(_redact_keys(args))}", err=True)
    add_commands(cli)
    cli.main(["serve", *args], prog_name="dashinfer-vlm")


def translate_flags(given: Mapping[str, Any]) -> list[str]:
    """Return the arguments for `dashinfer-vlm serve`.

    Args:
        given: the parameters of the old command, whose click context must be active.

    Raises:
        ConfigError: a flag is not supported; the message says what to use instead.
    """
    return [arg for flag in FLAGS for arg in _translate(flag, given[flag.name])]


def _translate(flag: OldFlag, value: str | bool | None) -> list[str]:
    if value is None or value is False:
        return []
    if callable(flag.new):
        return flag.new(str(value))
    if not flag.new:
        _show_note(flag.flag, flag.replacement)
        return []
    return [flag.new, str(value)] if flag.metavar else [flag.new]


def _show_note(flag: str, note: str) -> None:
    click.echo(f"dashinfer_vlm_serve: {flag}: {note}.", err=True)


def _redact_keys(args: list[str]) -> Iterator[str]:
    for previous, arg in zip(["", *args], args, strict=False):
        name, equals, _ = arg.partition("=")
        if name in API_KEY and equals:
            yield f"{name}=..."
        else:
            yield "..." if previous in API_KEY else arg


def _option(flag: OldFlag) -> click.Option:
    choices = flag.metavar.split("|")
    return click.Option(
        [flag.flag, flag.name],
        type=click.Choice(choices) if len(choices) > 1 else str if flag.metavar else None,
        metavar=flag.metavar if len(choices) == 1 else None,
        is_flag=not flag.metavar,
        required=flag.name == "model",
        help=flag.replacement,
    )


serve.params.extend(map(_option, FLAGS))


def main() -> None:
    """Entry point of the console script."""
    run(serve)
