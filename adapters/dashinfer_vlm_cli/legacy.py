"""`dashinfer_vlm_serve`: the command of the DashInfer-VLM toolkit, with its flags, over `dashinfer-vlm serve`.

The flags are those of all its versions (2.0 to 2.6, and its repository after that).
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
    """What became of a flag that was given.

    Attributes:
        words: what `serve` is called with in its place.
        told: what the person should know, if it is not the same as before.
    """

    words: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OldFlag:
    """A flag of the old command.

    Attributes:
        flag: as it was documented; `_` and `-` are the same.
        takes: its values, by `|` where only some are; empty if it takes none.
        now: for the documentation: what stands for it.
        becomes: makes that of a value.
    """

    flag: str
    takes: str = ""
    now: str
    becomes: Callable[[str], FlagTranslation]

    @property
    def choices(self) -> list[str]:
        return self.takes.split("|") if "|" in self.takes else []

    @property
    def name(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")


def renamed(flag: str) -> Callable[[str], FlagTranslation]:
    return lambda value: FlagTranslation(words=(flag, value))


def switched(flag: str) -> Callable[[str], FlagTranslation]:
    return lambda _: FlagTranslation(words=(flag,))


def without_effect(told: str) -> Callable[[str], FlagTranslation]:
    return lambda _: FlagTranslation(note=f"no effect; {told}")


def _quantized(kind: str) -> FlagTranslation:
    if kind in {"a16w8", "a8w8"}:
        told = "weights alone are quantised here, not activations" if kind == "a8w8" else ""
        return FlagTranslation(words=("--quantization", "int8"), note=told)
    if kind == "a16w4":
        return FlagTranslation(words=("--quantization", "uint4"))
    if kind == "fp8":
        return _fp8(kind)
    raise ConfigError(
        "`--quant-type` cannot be gptq or gptq_weight_only: checkpoints that are quantised already are not read. Name"
        " the unquantised one, with `--quant-type a16w8` or `a16w4`.",
        param="quant-type",
    )


def _fp8(_: str) -> FlagTranslation:
    raise ConfigError(
        "FP8 (`--fp8`, `--quant-type fp8`) is not available. Use `--quantization int8`, which is as small, or leave it"
        " out.",
        param="fp8",
    )


def _keys(keys: str) -> FlagTranslation:
    words = [word for key in keys.split(",") if key for word in ("--api-key", key)]
    return FlagTranslation(words=tuple(words))


def _origins(text: str) -> FlagTranslation:
    try:
        origins = json.loads(text)
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
        raise ConfigError("`--allowed-origins` is a list in JSON, such as '[\"https://example.com\"]'.")
    return FlagTranslation(words=("--allowed-origins", ",".join(origins)))


def _tls(_: str) -> FlagTranslation:
    parameters = click.get_current_context().params
    key, certificate = parameters["old_keyfile"], parameters["old_certfile"]
    if not key or not certificate:
        raise ConfigError(
            "`--ssl` wants the variables SSL_KEYFILE and SSL_CERTFILE: set them, or give `--ssl-keyfile` and"
            " `--ssl-certfile` in its place.",
            param="ssl",
        )
    return FlagTranslation(words=("--ssl-keyfile", key, "--ssl-certfile", certificate))


FLAGS = (
    OldFlag(flag="--model", takes="TEXT", now="`--model`; hub ids are Hugging Face's", becomes=renamed("--model")),
    OldFlag(flag="--host", takes="TEXT", now="`--host`", becomes=renamed("--host")),
    OldFlag(flag="--port", takes="INT", now="`--port`", becomes=renamed("--port")),
    OldFlag(
        flag="--vision_engine",
        takes="tensorrt|transformers",
        now="nothing: the vision tower is this package's own, in PyTorch",
        becomes=without_effect("the vision tower is this package's own, in PyTorch"),
    ),
    OldFlag(flag="--device", takes="TEXT", now="`--device`", becomes=renamed("--device")),
    OldFlag(
        flag="--max_length",
        takes="INT",
        now="`--max-model-len`; by default the checkpoint's, not 32000",
        becomes=renamed("--max-model-len"),
    ),
    OldFlag(
        flag="--max_batch",
        takes="INT",
        now="`--max-batch-size`; by default 32, not 128",
        becomes=renamed("--max-batch-size"),
    ),
    OldFlag(flag="--parallel_size", takes="INT", now="`--tensor-parallel`", becomes=renamed("--tensor-parallel")),
    OldFlag(
        flag="--enable-prefix-cache",
        now="`--prefix-cache`; on by default, `--no-prefix-cache` turns it off",
        becomes=switched("--prefix-cache"),
    ),
    OldFlag(flag="--fp8", now="refused: use `--quantization int8`", becomes=_fp8),
    OldFlag(
        flag="--quant-type",
        takes="gptq|gptq_weight_only|a8w8|a16w4|a16w8|fp8",
        now="`a16w8` and `a8w8`: `--quantization int8`; `a16w4`: `--quantization uint4`; the others are refused",
        becomes=_quantized,
    ),
    OldFlag(
        flag="--dtype",
        takes="bfloat16|float16|float32",
        now="`--dtype`; by default the checkpoint's",
        becomes=renamed("--dtype"),
    ),
    OldFlag(flag="--min-pixels", takes="INT", now="`--min-pixels`", becomes=renamed("--min-pixels")),
    OldFlag(
        flag="--max-pixels",
        takes="INT",
        now="`--max-pixels`; by default 1280 tokens' worth, not 16384",
        becomes=renamed("--max-pixels"),
    ),
    OldFlag(flag="--api-keys", takes="KEY,KEY", now="`--api-key`, once for each; better in a file", becomes=_keys),
    OldFlag(
        flag="--ssl",
        now="`--ssl-keyfile` and `--ssl-certfile`; SSL_KEYFILE and SSL_CERTFILE are read for this command",
        becomes=_tls,
    ),
    OldFlag(
        flag="--allowed-origins",
        takes="JSON",
        now="`--allowed-origins`, by commas; by default none, not all",
        becomes=_origins,
    ),
    OldFlag(
        flag="--allow-credentials",
        now="nothing: pages send the key themselves, in the header Authorization",
        becomes=without_effect("pages send the key themselves, in the header Authorization"),
    ),
    OldFlag(
        flag="--allowed-methods",
        takes="JSON",
        now="nothing: those that are answered are allowed",
        becomes=without_effect("the methods that are answered are allowed"),
    ),
    OldFlag(
        flag="--allowed-headers",
        takes="JSON",
        now="nothing: those that are understood are allowed",
        becomes=without_effect("the headers that are understood are allowed"),
    ),
)
"""Every flag that the old command had; docs/cli.md shows the same table."""


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

    Each flag is passed on to `dashinfer-vlm serve` under its new name; those of `serve` itself are taken too.
    """
    words = [*translated(given), *new]
    click.echo(f"dashinfer_vlm_serve is now: dashinfer-vlm serve {' '.join(_shown(words))}", err=True)
    add_commands(cli)
    cli.main(["serve", *words], prog_name="dashinfer-vlm")


def translated(given: Mapping[str, Any]) -> list[str]:
    """The words for `dashinfer-vlm serve`; `given` are the parameters of the old command, in whose context this is.

    Raises:
        ConfigError: what a flag asks for is not done; the message says what to use.
    """
    return [word for flag in FLAGS for word in _passed_on(flag, given[flag.name])]


def _passed_on(flag: OldFlag, value: str | bool | None) -> tuple[str, ...]:
    if value is None or value is False:
        return ()
    became = flag.becomes(str(value))
    if became.note:
        click.echo(f"dashinfer_vlm_serve: {flag.flag}: {became.note}.", err=True)
    return became.words


def _shown(words: list[str]) -> Iterator[str]:
    """The words without keys."""
    for before, word in zip(["", *words], words, strict=False):
        yield "..." if before == "--api-key" else word


def table() -> list[str]:
    """The flags as a table of Markdown."""
    rows = [f"| `{f'{flag.flag} {flag.takes}'.strip().replace('|', ' ')}` | {flag.now} |" for flag in FLAGS]
    return ["| In DashInfer-VLM | here |", "|---|---|", *rows]


def _add_options(command: click.Command) -> None:
    for flag in FLAGS:
        kind = click.Choice(flag.choices) if flag.choices else str
        option = (
            click.Option([flag.flag, flag.name], type=kind, metavar=None if flag.choices else flag.takes, help=flag.now)
            if flag.takes
            else click.Option([flag.flag, flag.name], is_flag=True, help=flag.now)
        )
        option.required = flag.name == "model"
        command.params.append(option)


_add_options(serve)


def main() -> None:
    """Entry point of the console script."""
    run(serve)
