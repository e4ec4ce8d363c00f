"""Measure a kernel set with the linear layers of a model. Weights are random numbers."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from .quantization import INT4, INT8
from .types import Activation, Kernels, Linear, LMHead
from .workload import LinearGroup, LinearShape, Workload

SAMPLE_WEIGHTS = 64_000_000
"""Layers of a group are measured until they have so many weights, 128 MB in bfloat16: in serving, the weights of each
layer come from memory."""

MIN_RUNS, MAX_RUNS = 4, 16
PASS_SECONDS = 1.0
"""A pass is run `MIN_RUNS` times, and then until it has taken so many seconds, at most `MAX_RUNS` times. The shortest
time counts: libraries generate code in the first run, and other processes use the processor in any."""

NUM_VALUES = 1_000_003
"""Random numbers that are generated; larger matrices repeat them. It is prime, so that no two rows are equal: equal
logits have no single largest one, which `LMHead.argmax` looks for."""

QUANTIZATIONS = {"none": None, "int8": INT8, "int4": INT4}


@torch.inference_mode()
def measure(kernels: Kernels, workload: Workload, dtype: torch.dtype) -> dict[int, float]:
    """Return the seconds of a forward pass of all linear layers of a model, by its number of rows."""
    samples = {group: _sample(kernels, workload, group, dtype) for group in workload.groups}
    return {
        rows: _time_pass({group: samples[group] for group in workload.groups_at(rows)}, rows, dtype)
        for rows, _ in workload.passes
    }


def _time_pass(samples: dict[LinearGroup, list[Linear | LMHead]], rows: int, dtype: torch.dtype) -> float:
    inputs = {width: _numbers(rows, width, dtype) for group in samples for _, width, _ in group.shapes}
    runs: list[float] = []
    began = time.perf_counter()
    while len(runs) < MIN_RUNS or (len(runs) < MAX_RUNS and time.perf_counter() - began < PASS_SECONDS):
        runs.append(sum(_time_group(group, layers, inputs) for group, layers in samples.items()))
    return min(runs)


def _time_group(group: LinearGroup, layers: list[Linear | LMHead], inputs: dict[int, Tensor]) -> float:
    """Return the seconds of all layers of a group, in proportion to those of the sample."""
    began = time.perf_counter()
    for index, layer in enumerate(layers):
        x = inputs[group.shapes[index % len(group.shapes)].inputs]
        if not group.is_head or layer.argmax(x) is None:  # type: ignore[union-attr]  # as a greedy decode step
            layer(x)
    return (time.perf_counter() - began) * group.repeats * len(group.shapes) / len(layers)


def _sample(kernels: Kernels, workload: Workload, group: LinearGroup, dtype: torch.dtype) -> list[Linear | LMHead]:
    copies = min(group.repeats, -(-SAMPLE_WEIGHTS * group.repeats // group.weights))
    return [_layer(kernels, shape, workload, group, dtype) for _ in range(copies) for shape in group.shapes]


def _layer(
    kernels: Kernels, shape: LinearShape, workload: Workload, group: LinearGroup, dtype: torch.dtype
) -> Linear | LMHead:
    weight, quantization = _numbers(shape.outputs, shape.inputs, dtype), QUANTIZATIONS[workload.quantization]
    if group.is_head:
        return kernels.head(weight, quantization=quantization)
    return kernels.linear(weight, activation=Activation[shape.activation.upper()], quantization=quantization)


def _numbers(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return a matrix of the magnitude of weights. Each has memory of its own, since kernels may keep it."""
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(min(rows * columns, NUM_VALUES), generator=generator) / 32).to(dtype)
    return values.repeat(-(-rows * columns // len(values)))[: rows * columns].view(rows, columns)
