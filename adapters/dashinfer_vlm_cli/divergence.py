"""`dashinfer-vlm divergence`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.cli.options import ModelArgument
from dashinfer_vlm_core.config import EngineConfig

from .engines import log_warnings_only
from .quantize import load_spec

if TYPE_CHECKING:
    from torch import Tensor

    from .recorded_engine import RecordedLogits


class Divergence(NamedTuple):
    """How much the predictions of two models differ.

    Attributes:
        tokens: number of predicted tokens.
        mean_kl: mean Kullback-Leibler divergence from the original's distribution, in nats.
        max_kl: the largest one.
        same_token: share of the tokens for which both models have the same most likely token.
    """

    tokens: int
    mean_kl: float
    max_kl: float
    same_token: float


@click.command(cls=EngineCommand, params=[ModelArgument()])
@click.option("--original", required=True, metavar="NAME|FOLDER", help="The model with unquantized weights.")
@click.option("--data", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Requests in the format of `batch`.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def divergence(*, original: str, data: Path, as_json: bool, config: EngineConfig) -> None:
    """Measure how much a quantized model differs from the original.

    The original completes the requests greedily, whatever model and number of tokens they name. Both models then
    predict each token of these answers, with 16-bit arithmetic on the CPU, so that only weights differ. Engine
    options such as --quantization apply to MODEL, and those for media to both.
    """
    from .recorded_engine import RecordedEngine, read_requests, record_logits

    log_warnings_only()
    requests = read_requests(data)
    changes = {"model": original, "revision": None, "quantization": "none", "vision_quantization": "auto"}
    reference = config.model_copy(update=changes)
    with RecordedEngine.open(reference) as opened:
        answers = [opened.answer(request) for request in requests]
        expected = record_logits(opened, load_spec(reference), requests, answers)
    with RecordedEngine.open(config) as opened:
        found = record_logits(opened, load_spec(config), requests, answers)
    result = compare(expected, found)
    if as_json:
        click.echo(json.dumps(result._asdict()))
    else:
        click.echo(
            f"{result.same_token:.1%} of {result.tokens} tokens have the same most likely token. KL divergence:"
            f" {result.mean_kl:.2e} nats on average, at most {result.max_kl:.2e}."
        )


def compare(expected: RecordedLogits, found: RecordedLogits) -> Divergence:
    """Compare the predictions of two models for the same tokens."""
    import torch

    divergences: list[Tensor] = []
    same: list[Tensor] = []
    for number in range(len(expected.hidden)):
        first = expected.logits(number)
        second = found.logits(number)
        logs = first.log_softmax(1)
        divergences.append((logs.exp() * (logs - second.log_softmax(1))).sum(1))
        same.append(first.argmax(1) == second.argmax(1))
    kl = torch.cat(divergences)
    return Divergence(len(kl), float(kl.mean()), float(kl.max()), float(torch.cat(same).float().mean()))
