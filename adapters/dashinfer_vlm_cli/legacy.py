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


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagTranslation:
    """The translation of a flag.

    Attributes:
        args: the corresponding arguments of `serve`.
        note: a message for the user if the behavior differs.
    """

    args: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OldFlag:
    """A flag of the old command.

    Attributes:
        flag: the documented spelling; `_` and `-` are equivalent.
        metavar: its value, or its choices separated by `|`; empty for a switch.
        replacement: what to use instead, for the documentation.
        translate: translates a value of the flag.
    """

    flag: str
    metavar: str = ""
    replacement: str
    translate: Callable[[str], FlagTranslation]

    @property
    def choices(self) -> list[str]:
        return self.metavar.split("|") if "|" in self.metavar else []

    @property
    def name(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")


GPTQ_IS_DETECTED = "GPTQ checkpoints are recognized from their config.json"


def rename_to(flag: str) -> Callable[[str], FlagTranslation]:
    return lambda value: FlagTranslation(args=(flag, value))


def switch_to(flag: str) -> Callable[[str], FlagTranslation]:
    return lambda _: FlagTranslation(args=(flag,))


def ignore(reason: str) -> Callable[[str], FlagTranslation]:
    return lambda _: FlagTranslation(note=f"no effect; {reason}")


def _translate_quant_type(kind: str) -> FlagTranslation:
    if kind in {"a16w8", "a8w8"}:
        note = "only weights are quantized, not activations" if kind == "a8w8" else ""
        return FlagTranslation(args=("--quantization", "int8"), note=note)
    if kind == "a16w4":
        return FlagTranslation(args=("--quantization", "int4"))
    if kind == "fp8":
        return _reject_fp8(kind)
    return FlagTranslation(note=f"no effect; {GPTQ_IS_DETECTED}")


def _reject_fp8(_: str) -> FlagTranslation:
    raise ConfigError(
        "Weights cannot be quantized to FP8 (`--fp8`, `--quant-type fp8`). Use `--quantization int8`, which needs the"
        " same memory, or leave it out. FP8 checkpoints need no option.",
        param="fp8",
    )


def _translate_keys(keys: str) -> FlagTranslation:
    args = [arg for key in keys.split(",") if key for arg in ("--api-key", key)]
    return FlagTranslation(args=tuple(args))


def _translate_origins(text: str) -> FlagTranslation:
    try:
        origins = json.loads(text)
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
        raise ConfigError("`--allowed-origins` must be a JSON list, such as '[\"https://example.com\"]'.")
    return FlagTranslation(args=("--allowed-origins", ",".join(origins)))


def _translate_tls(_: str) -> FlagTranslation:
    parameters = click.get_current_context().params
    key, certificate = parameters["old_keyfile"], parameters["old_certfile"]
    if not key or not certificate:
        raise ConfigError(
            "`--ssl` requires the environment variables SSL_KEYFILE and SSL_CERTFILE. Set them, or use `--ssl-keyfile`"
            " and `--ssl-certfile` instead.",
            param="ssl",
        )
    return FlagTranslation(args=("--ssl-keyfile", key, "--ssl-certfile", certificate))


FLAGS = (
    OldFlag(
        flag="--model",
        metavar="TEXT",
        replacement="`--model`; model IDs refer to Hugging Face",
        translate=rename_to("--model"),
    ),
    OldFlag(flag="--host", metavar="TEXT", replacement="`--host`", translate=rename_to("--host")),
    OldFlag(flag="--port", metavar="INT", replacement="`--port`", translate=rename_to("--port")),
    OldFlag(
        flag="--vision_engine",
        metavar="tensorrt|transformers",
        replacement="no effect: the vision encoder is this package's, in PyTorch",
        translate=ignore("the vision encoder is this package's, in PyTorch"),
    ),
    OldFlag(flag="--device", metavar="TEXT", replacement="`--device`", translate=rename_to("--device")),
    OldFlag(
        flag="--max_length",
        metavar="INT",
        replacement="`--max-model-len`; defaults to the checkpoint's, not 32000",
        translate=rename_to("--max-model-len"),
    ),
    OldFlag(
        flag="--max_batch",
        metavar="INT",
        replacement="`--max-batch-size`; defaults to 32, not 128",
        translate=rename_to("--max-batch-size"),
    ),
    OldFlag(
        flag="--parallel_size",
        metavar="INT",
        replacement="`--tensor-parallel`",
        translate=rename_to("--tensor-parallel"),
    ),
    OldFlag(
        flag="--enable-prefix-cache",
        replacement="`--prefix-cache`; enabled by default, `--no-prefix-cache` disables it",
        translate=switch_to("--prefix-cache"),
    ),
    OldFlag(flag="--fp8", replacement="rejected: use `--quantization int8`", translate=_reject_fp8),
    OldFlag(
        flag="--quant-type",
        metavar="gptq|gptq_weight_only|a8w8|a16w4|a16w8|fp8",
        replacement="`a16w8` and `a8w8`: `--quantization int8`; `a16w4`: `--quantization int4`; `fp8`: rejected;"
        f" others: no effect, {GPTQ_IS_DETECTED}",
        translate=_translate_quant_type,
    ),
    OldFlag(
        flag="--dtype",
        metavar="bfloat16|float16|float32",
        replacement="`--dtype`; defaults to the checkpoint's",
        translate=rename_to("--dtype"),
    ),
    OldFlag(flag="--min-pixels", metavar="INT", replacement="`--min-pixels`", translate=rename_to("--min-pixels")),
    OldFlag(
        flag="--max-pixels",
        metavar="INT",
        replacement="`--max-pixels`; defaults to the pixels of 1280 tokens, not of 16384",
        translate=rename_to("--max-pixels"),
    ),
    OldFlag(
        flag="--api-keys",
        metavar="KEY,KEY",
        replacement="`--api-key`, once per key; `--api-key-file` is safer",
        translate=_translate_keys,
    ),
    OldFlag(
        flag="--ssl",
        replacement="`--ssl-keyfile` and `--ssl-certfile`; this command reads SSL_KEYFILE and SSL_CERTFILE",
        translate=_translate_tls,
    ),
    OldFlag(
        flag="--allowed-origins",
        metavar="JSON",
        replacement="`--allowed-origins`, separated by commas; defaults to none, not all",
        translate=_translate_origins,
    ),
    OldFlag(
        flag="--allow-credentials",
        replacement="no effect: pages send the key in the `Authorization` header",
        translate=ignore("pages send the key in the Authorization header"),
    ),
    OldFlag(
        flag="--allowed-methods",
        metavar="JSON",
        replacement="no effect: all supported methods are allowed",
        translate=ignore("all supported methods are allowed"),
    ),
    OldFlag(
        flag="--allowed-headers",
        metavar="JSON",
        replacement="no effect: all supported headers are allowed",
        translate=ignore("all supported headers are allowed"),
    ),
)
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


def _translate(flag: OldFlag, value: str | bool | None) -> tuple[str, ...]:
    if value is None or value is False:
        return ()
    translation = flag.translate(str(value))
    if translation.note:
        click.echo(f"dashinfer_vlm_serve: {flag.flag}: {translation.note}.", err=True)
    return translation.args


def _redact_keys(args: list[str]) -> Iterator[str]:
    for previous, arg in zip(["", *args], args, strict=False):
        yield "..." if previous == "--api-key" else arg


def table() -> list[str]:
    """Return the flags as a Markdown table."""
    rows = [f"| `{f'{flag.flag} {flag.metavar}'.strip().replace('|', ' ')}` | {flag.replacement} |" for flag in FLAGS]
    return ["| In DashInfer-VLM | In dashinfer-vlm |", "|---|---|", *rows]


def _add_options(command: click.Command) -> None:
    for flag in FLAGS:
        kind = click.Choice(flag.choices) if flag.choices else str
        option = (
            click.Option(
                [flag.flag, flag.name],
                type=kind,
                metavar=None if flag.choices else flag.metavar,
                help=flag.replacement,
            )
            if flag.metavar
            else click.Option([flag.flag, flag.name], is_flag=True, help=flag.replacement)
        )
        option.required = flag.name == "model"
        command.params.append(option)


_add_options(serve)


def main() -> None:
    """Entry point of the console script."""
    run(serve)
