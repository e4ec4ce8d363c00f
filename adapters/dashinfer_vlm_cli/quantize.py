"""`dashinfer-vlm quantize`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.cli.terminal import show_table
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import ConfigError

from .batch_files import Entry, read_entries
from .engines import log_warnings_only

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import Engine
    from dashinfer_vlm_core.kernels import Quantization
    from dashinfer_vlm_core.models.checkpoint_quantizer import QuantizedCheckpoint
    from dashinfer_vlm_core.models.spec import ModelSpec

    from .accuracy import AccuracyReport

GROUP_SIZES = ("32", "64", "128")
DEFAULT_GROUP_SIZE = 32
"""That of `--quantization int4`."""

REPORT = "accuracy.json"
MAX_ROWS = 20
"""Maximum number of requests in the printed table; the file has all of them."""


@click.command(cls=EngineCommand)
@click.argument("name", metavar="MODEL")
@click.argument("output", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--to", "precision", required=True, type=click.Choice(["int4", "int8"]), help="Bits of a weight.")
@click.option("--group-size", type=click.Choice(GROUP_SIZES),
              help=f"Number of inputs that share a scale, with int4.  [default: {DEFAULT_GROUP_SIZE}]")  # fmt: skip
@click.option("--data", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help=f"Requests in the format of `batch`, to compare both models in OUT/{REPORT}.")  # fmt: skip
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(min=1), metavar="INT",
              help="Maximum number of tokens to compare for each request.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def quantize(
    *,
    name: str,
    output: Path,
    precision: Literal["int4", "int8"],
    group_size: str | None,
    data: Path | None,
    max_tokens: int,
    as_json: bool,
    config: EngineConfig,
) -> None:
    """Write a checkpoint with weights of 4 or 8 bits, and measure its accuracy.

    MODEL is a registered name, a checkpoint folder, or a Hugging Face model ID. The text model's layers are rounded as
    by --quantization int4 or int8; the vision encoder, the embedding table and the output layer are copied. OUT is a
    new folder in the format compressed-tensors, which vLLM loads too. One tensor at a time is in memory.

    With --data, the original completes the requests, and both models predict each token of the completions. The
    report states for how many tokens they agree, the Kullback-Leibler divergence, and the largest difference of logits.
    Engine options, such as --max-pixels, apply to this comparison.
    """
    log_warnings_only()
    _check_options(config)
    entries = read_entries(data) if data else []
    if data and not entries:
        raise ConfigError(f"{data} has no requests.")
    written = _write(config.model_copy(update={"model": name}), output, _quantization(precision, group_size))
    report = _compare(config, (name, output), data, entries, max_tokens) if data else None
    if report:
        (output / REPORT).write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    if as_json:
        click.echo(json.dumps(_as_json(written, report), indent=2))
    else:
        _show(written, report)
    if report and not report.compared:
        click.get_current_context().exit(1)


def _check_options(config: EngineConfig) -> None:
    """Reject engine options that contradict the arguments of this command."""
    if click.get_current_context().get_parameter_source("model") is ParameterSource.COMMANDLINE:
        raise click.UsageError("The model is given twice: as MODEL and by --model. Leave out --model.")
    if config.quantization != "none":
        raise ConfigError(
            f"`quantization` {config.quantization} rounds weights while they are loaded. Remove it, and use `--to`.",
            param="quantization",
        )
    if config.decoder not in ("auto", "torch"):
        message = f"The decoder {config.decoder} does not return logits. Set `decoder` to torch, or remove it."
        raise ConfigError(message, param="decoder")


def _quantization(precision: Literal["int4", "int8"], group_size: str | None) -> Quantization:
    from dashinfer_vlm_core.kernels import Quantization

    if precision == "int8":
        if group_size is not None:
            raise click.UsageError("`--group-size` requires `--to int4`: with int8, there is one scale per output.")
        return Quantization(8)
    return Quantization(4, int(group_size or DEFAULT_GROUP_SIZE))


def _write(config: EngineConfig, output: Path, quantization: Quantization) -> QuantizedCheckpoint:
    from dashinfer_vlm_core.models.checkpoint_quantizer import CheckpointQuantizer, check_output_folder

    from .concurrency import progress

    check_output_folder(output)  # before a download
    quantizer = CheckpointQuantizer(_load_spec(config), quantization)
    with progress(quantizer.num_tensors, unit="tensor") as advance:
        return quantizer.write(output, advance)


def _load_spec(config: EngineConfig) -> ModelSpec:
    from dashinfer_vlm_core.models.checkpoint import find_model
    from dashinfer_vlm_core.plugins import load_plugins

    registry = load_plugins()
    folder = find_model(config.model, registered=registry.models, revision=config.revision)
    return registry.family_of(folder).load_spec(folder)


def _compare(
    config: EngineConfig, models: tuple[str, Path], data: Path, entries: Sequence[Entry], max_tokens: int
) -> AccuracyReport:
    from .accuracy import measure_accuracy
    from .concurrency import progress

    original, quantized = models

    def open_engine(model: str) -> Engine:
        from dashinfer_vlm_core.engine import Engine

        click.echo(f"Loading {model} ...", err=True)
        return Engine(config.model_copy(update={"model": model, "decoder": "torch"}))

    with progress(2 * len(entries), unit="request") as advance:
        return measure_accuracy(
            data,
            entries,
            original=lambda: open_engine(original),
            quantized=lambda: open_engine(str(quantized)),
            max_tokens=max_tokens,
            folder=quantized.absolute().parent,
            advance=advance,
        )


def _as_json(written: QuantizedCheckpoint, report: AccuracyReport | None) -> dict[str, Any]:
    return {
        "folder": str(written.folder),
        "num_quantized": written.num_quantized,
        "original_bytes": written.original_bytes,
        "quantized_bytes": written.quantized_bytes,
        "omitted": list(written.omitted),
        "accuracy": report.as_json() if report else None,
    }


def _show(written: QuantizedCheckpoint, report: AccuracyReport | None) -> None:
    original, quantized = written.original_bytes, written.quantized_bytes
    click.echo(
        f"{written.folder}: {written.num_quantized} matrices quantized,"
        f" {quantized / 1e6:,.1f} MB instead of {original / 1e6:,.1f} MB ({quantized / original:.0%})."
    )
    if written.omitted:
        click.echo(f"Not copied: {', '.join(written.omitted)}.", err=True)
    if report:
        _show_accuracy(report, written.folder)


def _show_accuracy(report: AccuracyReport, folder: Path) -> None:
    rows = [
        (row.custom_id, f"{row.equal_tokens}/{row.tokens}", f"{row.mean_kl:.2e}", f"{row.max_logit_difference:.3f}")
        for row in report.compared[:MAX_ROWS]
    ]
    totals = report.as_json()
    if rows:
        click.echo()
        show_table(("Request", "Equal tokens", "Mean KL", "Max difference"), rows)
        if len(report.compared) > MAX_ROWS:
            click.echo(f"and {len(report.compared) - MAX_ROWS} more requests, see {folder / REPORT}")
        click.echo(
            f"\n{totals['equal_tokens'] / totals['tokens']:.1%} of {totals['tokens']} tokens are equal, and all tokens"
            f" of {totals['equal_completions']} of {totals['num_requests']} requests. Mean KL divergence:"
            f" {totals['mean_kl']:.2e} nats; largest difference of a logit: {totals['max_logit_difference']:.3f}."
        )
    for row in report.requests:
        if row.error:
            click.echo(f"{row.custom_id} failed: {row.error}", err=True)
