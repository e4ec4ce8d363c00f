"""Compare the logits of a quantized model with those of the original, on the requests of a batch file."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dashinfer_vlm_core.errors import ConfigError, DashInferVLMError

from .batch_files import Entry, read_body

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import Engine

Logits = npt.NDArray[np.float32]

BYTES_PER_LOGIT = 4
REPLACED_FIELDS = frozenset(
    {"max_tokens", "max_completion_tokens", "min_tokens", "n", "model", "logprobs", "top_logprobs", "temperature"}
)
"""Fields of requests that do not apply: the reference is one greedy completion of the original."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestAccuracy:
    """How the quantized model's predictions differ for one request.

    The reference is the original's greedy completion. Both models predict each of its tokens, given those before it.

    Attributes:
        custom_id: of the request.
        tokens: length of the reference.
        equal_tokens: for how many of its tokens both models have the same most likely token.
        first_difference: index of the first of the other tokens; None if there are none.
        mean_kl: mean of the Kullback-Leibler divergences of the quantized model's distributions from the original's, in
            nats.
        max_logit_difference: the largest absolute difference between two logits.
        error: why the original could not complete the request, or the quantized model not predict it; the other
            attributes are then 0.
    """

    custom_id: str
    tokens: int = 0
    equal_tokens: int = 0
    first_difference: int | None = None
    mean_kl: float = 0.0
    max_logit_difference: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyReport:
    """How the quantized model's predictions differ for all requests; fields as in `RequestAccuracy`, over all tokens.

    Attributes:
        requests: one entry per request, in the order of the file.
    """

    requests: tuple[RequestAccuracy, ...]

    @property
    def compared(self) -> tuple[RequestAccuracy, ...]:
        """The requests without an error."""
        return tuple(request for request in self.requests if not request.error)

    def as_json(self) -> dict[str, Any]:
        """Return totals and requests as a JSON object."""
        compared = self.compared
        tokens = sum(request.tokens for request in compared)
        return {
            "num_requests": len(compared),
            "num_failed": len(self.requests) - len(compared),
            "tokens": tokens,
            "equal_tokens": sum(request.equal_tokens for request in compared),
            "equal_completions": sum(request.first_difference is None for request in compared),
            "mean_kl": sum(request.mean_kl * request.tokens for request in compared) / tokens if tokens else None,
            "max_logit_difference": max((request.max_logit_difference for request in compared), default=None),
            "requests": [
                {name: getattr(request, name) for name in RequestAccuracy.__slots__} for request in self.requests
            ],
        }


@dataclass(frozen=True, slots=True)
class _Reference:
    """The original's completion of one request.

    Attributes:
        body: the request.
        token_ids: the completion.
        offset: index of its first logit in the temporary file.
    """

    body: dict[str, Any]
    token_ids: tuple[int, ...]
    offset: int


class ReferenceLogits:
    """Completions of the original, with their logits in a temporary file: only one model is in memory at a time.

    Args:
        requests: the batch file.
        folder: where to create the file, which has no name and vanishes when it is closed.
    """

    def __init__(self, requests: Path, folder: Path) -> None:
        self._requests = requests
        self._folder = folder
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - `close` closes it
        self._references: dict[str, _Reference | str] = {}
        self._size = 0

    def add(self, engine: Engine, entry: Entry, max_tokens: int) -> None:
        """Compute the original's completion of a request; an error of the request is kept.

        Raises:
            ConfigError: the disk is full.
        """
        body = _greedy(read_body(self._requests, entry), max_tokens)
        try:
            token_ids = engine.submit(body).result().token_ids[0]
            logits = engine.logits(body, token_ids)
        except DashInferVLMError as error:
            self._references[entry.custom_id] = error.message
            return
        if shutil.disk_usage(self._folder).free < 2 * logits.nbytes:
            raise ConfigError(
                f"{self._folder} has no space for the logits of the original. Reduce the number of requests, or"
                " --max-tokens.",
            )
        self._references[entry.custom_id] = _Reference(body, token_ids, self._size)
        logits.tofile(self._file)
        self._size += logits.size

    def compare(self, engine: Engine, entry: Entry) -> RequestAccuracy:
        """Compare the quantized model's predictions of a completion with the original's."""
        reference = self._references[entry.custom_id]
        if isinstance(reference, str):
            return RequestAccuracy(custom_id=entry.custom_id, error=reference)
        try:
            logits = engine.logits(reference.body, reference.token_ids)
        except DashInferVLMError as error:
            return RequestAccuracy(custom_id=entry.custom_id, error=error.message)
        self._file.seek(reference.offset * BYTES_PER_LOGIT)
        original = np.fromfile(self._file, np.float32, logits.size).reshape(logits.shape)
        return compare_logits(entry.custom_id, original, logits)

    def close(self) -> None:
        self._file.close()


def compare_logits(custom_id: str, original: Logits, quantized: Logits) -> RequestAccuracy:
    """Compare the logits of two models for the same tokens, both float32 [tokens, vocab_size]."""
    equal = original.argmax(axis=1) == quantized.argmax(axis=1)
    reference, other = _log_softmax(original), _log_softmax(quantized)
    divergences = (np.exp(reference) * (reference - other)).sum(axis=1)
    return RequestAccuracy(
        custom_id=custom_id,
        tokens=len(original),
        equal_tokens=int(equal.sum()),
        first_difference=None if equal.all() else int(equal.argmin()),
        mean_kl=float(divergences.mean()),
        max_logit_difference=float(np.abs(original - quantized).max()),
    )


def measure_accuracy(
    requests: Path,
    entries: Sequence[Entry],
    *,
    original: Callable[[], contextlib.AbstractContextManager[Engine]],
    quantized: Callable[[], contextlib.AbstractContextManager[Engine]],
    max_tokens: int,
    folder: Path,
    advance: Callable[[], None] = lambda: None,
) -> AccuracyReport:
    """Compare two models on the requests of a batch file, one model after the other.

    Args:
        requests: the file.
        entries: its requests.
        original: opens the engine of the original.
        quantized: opens the engine of the quantized model.
        max_tokens: maximum number of tokens of a completion.
        folder: where to create a temporary file with four bytes per token and entry of the vocabulary.
        advance: called twice per request.

    Raises:
        SetupError: an engine cannot be loaded, or does not return logits.
        ConfigError: the disk is full, or the file has changed.
    """
    with contextlib.closing(ReferenceLogits(requests, folder)) as references:
        with original() as engine:
            for entry in entries:
                references.add(engine, entry, max_tokens)
                advance()
        with quantized() as engine:
            return AccuracyReport(requests=tuple(_compare_all(references, engine, entries, advance)))


def _compare_all(
    references: ReferenceLogits, engine: Engine, entries: Sequence[Entry], advance: Callable[[], None]
) -> Iterator[RequestAccuracy]:
    for entry in entries:
        yield references.compare(engine, entry)
        advance()


def _greedy(body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """Return the request for one greedy completion of at most `max_tokens` tokens."""
    kept = {name: value for name, value in body.items() if name not in REPLACED_FIELDS}
    return {**kept, "temperature": 0, "max_tokens": max_tokens}


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
