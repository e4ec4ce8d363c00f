"""The table of docs/models.md, from the shapes in the published `config.json`: `python -m benchmarks.model_table`."""

from __future__ import annotations

from dataclasses import dataclass

from dashinfer_vlm_core.models.memory import (
    INT4_STORED,
    FormatBytes,
    ModelSize,
    WeightBytes,
    count_all_layer_weights,
    count_weights,
    loaded_bytes,
    step_bytes,
)
from dashinfer_vlm_core.models.published import MODELS

from .limits import BF16, PACKED_BF16, PACKED_HEAD

BANDWIDTH = 50
"""In 1e9 bytes per second."""
AWQ = (4 + (16 + 4) / 128) / 8
"""Bytes of a 4-bit weight in a checkpoint: each group of 128 inputs has a scale and a zero point."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """Bytes of a weight: in memory with the C kernels, and of the layers in a file, where all others have 16 bits."""

    memory: WeightBytes
    file: float


def _format(layers: FormatBytes, others: float, head: float, file: float) -> Format:
    # The embedding table has 16 bits, and an output layer is read in 8 bits to find the argmax.
    return Format(
        memory=WeightBytes(layers=layers, vision=others, head=head, argmax=FormatBytes(int8=PACKED_HEAD), itemsize=2),
        file=file,
    )


FORMATS = (
    _format(FormatBytes(wide=PACKED_BF16), PACKED_BF16, PACKED_BF16 + PACKED_HEAD, BF16),
    _format(FormatBytes(int8=1), 1, 1, 1),
    _format(FormatBytes(int4=INT4_STORED), 1, 1, AWQ),
)
"""bfloat16; `--quantization int8`; AWQ with `--quantization int8`."""


def disk_bytes(model: ModelSize, stored: Format) -> float:
    layers = count_all_layer_weights(model.text)
    return stored.file * layers + BF16 * (count_weights(model) - layers)


def model_table() -> str:
    """Return the table in Markdown."""
    titles = ("Model", "Parameters, 1e9", "RAM, GB", "Disk, GB", f"Tokens/s at {BANDWIDTH} GB/s")
    names: dict[str, list[str]] = {}
    for name, model in MODELS.items():
        names.setdefault(_cells(model), []).append(name)
    rows = (f"| {', '.join(equal)} | {cells} |" for cells, equal in names.items())
    return "\n".join([f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *rows])


def _cells(model: ModelSize) -> str:
    cells = [
        [loaded_bytes(model, stored.memory) / 1e9 for stored in FORMATS],
        [disk_bytes(model, stored) / 1e9 for stored in FORMATS],
        [BANDWIDTH * 1e9 / sum(step_bytes(model.text, stored.memory)) for stored in FORMATS],
    ]
    texts = (" / ".join(map(_short, numbers)) for numbers in cells)
    return " | ".join([_short(count_weights(model) / 1e9), *texts])


def _short(number: float) -> str:
    return f"{number:.1f}" if number < 10 else f"{number:.0f}"


def main() -> None:
    print(model_table())


if __name__ == "__main__":
    main()
