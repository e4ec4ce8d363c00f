"""Measure kernel sets with the linear layers of a model, in a fixed time.

The layers are a sample of the model's: few enough to be packed in a moment, and enough that their weights come from
memory at each pass, as they do in serving, as far as the processor's cache allows. Weights are random numbers.
"""

from __future__ import annotations

import bisect
import functools
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..concurrency.compute import executor_for
from .quantization import INT4, INT8
from .types import Activation, Kernels, Linear, LMHead
from .workload import TEXT_MODEL, LinearGroup, LinearShape, Workload

SAMPLE_WEIGHTS_PER_THREAD = 8_000_000
"""Maximum number of weights of a sample of decoder layers. That of an LM head or of a vision encoder has half as many:
the one is added to a sample of layers, and the other does not have to come from memory, since many rows use it."""

MAX_SAMPLE_WEIGHTS = 64_000_000
"""128 MB in bfloat16, for each kernel set."""

OUTPUT_STEP = 64
"""Sampled layers have a multiple of this number of outputs, so that gate and up projection are whole panels of 32."""

NOISE_VALUES = 1_000_003
"""Random numbers that are generated; larger matrices repeat them. It is prime, so that no two rows are equal: equal
logits have no single largest one, which `LMHead.argmax` looks for."""

WARM_ROWS = 64
"""Passes of at most as many rows are run once before they are timed: a library that generates code for a new shape
needs about as long for it as for the pass."""

MIN_ROUNDS, MAX_ROUNDS = 4, 8
"""Number of rounds of the two best sets, unless the budget is used before, and of sets that are about equal."""

DROP_RATIO = 1.5
"""A set that takes this many times as long as the best one is not measured again, unless it is one of the two best."""

SKIP_RATIO = 4.0
"""A pass that would take this many times as long as the best set's is estimated from the pass with fewer rows."""

MEMORY_BOUND_ROWS = 16
"""For estimates: passes of at most as many rows take as long as the weights are read, and others are proportional to
their rows."""


class Figures(NamedTuple):
    """The measured speed of one kernel set.

    Attributes:
        seconds: seconds of a forward pass of all linear layers of the model, by its number of rows; the shortest of all
            runs.
        estimated: numbers of rows that were not run: their seconds are derived from a pass with fewer rows.
        spread: the score of the second shortest runs, relative to that of the shortest ones; infinite if a pass was run
            once or not at all. It is close to 1 on an idle machine.
    """

    seconds: Mapping[int, float]
    estimated: frozenset[int] = frozenset()
    spread: float = math.inf


def measure(
    kernels: Mapping[str, Kernels], workload: Workload, dtype: torch.dtype, *, budget: float
) -> dict[str, Figures]:
    """Measure kernel sets on the CPU; on its compute thread, between the forward passes of running engines.

    All sets run each pass in the first round. Then the best ones take turns until the budget is used, and the shortest
    time of each pass counts.

    Args:
        kernels: the sets by name, the presumably fastest first.
        workload: the linear layers and the passes.
        dtype: the dtype of the weights.
        budget: seconds for everything. It is exceeded by at most one pass that takes longer than expected.
    """
    run = executor_for("cpu").run
    deadline = time.perf_counter() + budget
    noise = run(lambda: _noise(workload, dtype))
    subjects = {name: run(functools.partial(_Subject, kernel, workload, noise)) for name, kernel in kernels.items()}
    rivals = list(subjects.values())
    for number in range(MAX_ROUNDS):
        for rows, _ in workload.passes:
            for subject in rivals:
                best = min((other.runs[rows][0] for other in subjects.values() if other.runs[rows]), default=None)
                run(functools.partial(subject.time_pass, rows, deadline=deadline, best=best))
        rivals.sort(key=lambda subject: workload.score(subject.seconds()))
        limit = DROP_RATIO * workload.score(rivals[0].seconds())
        kept = [subject for subject in rivals if workload.score(subject.seconds()) <= limit]
        enough = number + 1 >= MIN_ROUNDS
        rivals = kept if enough or len(kept) > 1 else rivals[:2]
        if (enough and len(rivals) == 1) or time.perf_counter() >= deadline:
            break
    return {name: subject.figures() for name, subject in subjects.items()}


class _Sample(NamedTuple):
    """The layers of a group that are measured.

    Attributes:
        layers: pairs of a layer and its number of inputs, in order.
        scale: how many times as many weights the group has.
    """

    layers: list[tuple[Linear | LMHead, int]]
    scale: float


class _Subject:
    """A kernel set that is measured, with its layers.

    Attributes:
        runs: seconds of the whole model, of each run of a pass by its number of rows; the shortest first.
    """

    def __init__(self, kernels: Kernels, workload: Workload, noise: Tensor) -> None:
        self.runs: dict[int, list[float]] = {rows: [] for rows, _ in workload.passes}
        self._noise = noise
        self._workload = workload
        self._samples = [_sample(kernels, workload, group, noise) for group in workload.groups]

    def time_pass(self, rows: int, *, deadline: float, best: float | None) -> None:
        """Run a pass, unless it would take too long.

        Args:
            rows: number of rows.
            deadline: when the measurement has to end, as `time.perf_counter` counts.
            best: the shortest time of all sets for this pass.
        """
        expected = self._expected(rows)
        if expected is not None:
            too_late = time.perf_counter() + self._cost(rows, expected) > deadline
            if too_late or (best is not None and expected > SKIP_RATIO * best):
                return
        if not self.runs[rows] and rows <= WARM_ROWS:
            self._run(rows)
        bisect.insort(self.runs[rows], self._run(rows))

    def seconds(self) -> dict[int, float]:
        """Return the shortest time of each pass; the estimated one if it was not run."""
        return {rows: runs[0] if runs else self._expected(rows) or math.inf for rows, runs in self.runs.items()}

    def figures(self) -> Figures:
        seconds, score = self.seconds(), self._workload.score
        repeated = all(len(runs) > 1 for runs in self.runs.values())
        return Figures(
            seconds=seconds,
            estimated=frozenset(rows for rows, runs in self.runs.items() if not runs),
            spread=score({rows: runs[1] for rows, runs in self.runs.items()}) / score(seconds)
            if repeated
            else math.inf,
        )

    def _expected(self, rows: int) -> float | None:
        """Return the seconds of a pass: the shortest ones, or an estimate from the next pass with fewer rows."""
        fewer = max((other for other, runs in self.runs.items() if runs and other <= rows), default=None)
        if fewer is None:
            return None
        share = self._workload.weights_at(rows) / self._workload.weights_at(fewer)
        return self.runs[fewer][0] * share * max(rows, MEMORY_BOUND_ROWS) / max(fewer, MEMORY_BOUND_ROWS)

    def _cost(self, rows: int, seconds: float) -> float:
        """Return how long it takes to run the sample of a pass that takes `seconds` for the whole model."""
        samples = sum(group.weights / sample.scale for group, sample in self._pairs(rows))
        return seconds * samples / self._workload.weights_at(rows)

    def _pairs(self, rows: int) -> list[tuple[LinearGroup, _Sample]]:
        groups = self._workload.groups_at(rows)
        pairs = zip(self._workload.groups, self._samples, strict=True)
        return [(group, sample) for group, sample in pairs if group in groups]

    @torch.inference_mode()
    def _run(self, rows: int) -> float:
        """Return the seconds of a pass of the whole model, in proportion to the sample."""
        total = 0.0
        for _, sample in self._pairs(rows):
            inputs = {width: _matrix(self._noise, rows, width) for _, width in sample.layers}
            start = time.perf_counter()
            for layer, width in sample.layers:
                _apply(layer, inputs[width])
            total += sample.scale * (time.perf_counter() - start)
        return total


def _apply(layer: Linear | LMHead, x: Tensor) -> None:
    """Run a layer; an LM head as in a greedy decode step."""
    if not hasattr(layer, "argmax") or layer.argmax(x) is None:
        layer(x)


def _sample(kernels: Kernels, workload: Workload, group: LinearGroup, noise: Tensor) -> _Sample:
    limit, weights = _limit(workload, group), group.weights // group.repeats
    shapes = [_reduced(shape, min(1.0, limit / weights)) for shape in group.shapes]
    sampled = sum(shape.weights for shape in shapes)
    quantization = {"none": None, "int8": INT8, "int4": INT4}[workload.quantization]
    copies = min(group.repeats, max(1, limit // sampled))
    layers = [
        (_layer(kernels, shape, noise, is_head=group.is_head, quantization=quantization), shape.inputs)
        for _ in range(copies)
        for shape in shapes
    ]
    return _Sample(layers, group.weights / (copies * sampled))


def _limit(workload: Workload, group: LinearGroup) -> int:
    """Return the maximum number of weights of a group's sample."""
    limit = min(MAX_SAMPLE_WEIGHTS, SAMPLE_WEIGHTS_PER_THREAD * torch.get_num_threads())
    return limit if workload.name == TEXT_MODEL and not group.is_head else limit // 2


def _reduced(shape: LinearShape, share: float) -> LinearShape:
    """Return a layer with a share of the outputs."""
    if share >= 1:
        return shape
    outputs = max(OUTPUT_STEP, int(shape.outputs * share) // OUTPUT_STEP * OUTPUT_STEP)
    return shape._replace(outputs=min(shape.outputs, outputs))


def _layer(kernels: Kernels, shape: LinearShape, noise: Tensor, *, is_head: bool, **options: Any) -> Linear | LMHead:
    # Cloned, since a set may keep the tensor: layers that share memory would be read from the processor's cache.
    weight = _matrix(noise, shape.outputs, shape.inputs).clone()
    if is_head:
        return kernels.head(weight, **options)
    return kernels.linear(weight, activation=Activation[shape.activation.upper()], **options)


def _noise(workload: Workload, dtype: torch.dtype) -> Tensor:
    """Return enough numbers of the magnitude of weights for every matrix of a sample and its inputs."""
    sizes = [
        max(min(shape.weights, _limit(workload, group) + OUTPUT_STEP * shape.inputs), rows * shape.inputs)
        for group in workload.groups
        for shape in group.shapes
        for rows, _ in workload.passes
    ]
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(min(max(sizes), NOISE_VALUES), generator=generator) / 32).to(dtype)
    return values.repeat(-(-max(sizes) // len(values)))


def _matrix(noise: Tensor, rows: int, columns: int) -> Tensor:
    return noise[: rows * columns].view(rows, columns)
