"""The table of docs/models.md, from the shapes in the published `config.json`: `python -m benchmarks.model_table`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dashinfer_vlm_core.text_spec import (
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    RotarySpec,
    TextModelSpec,
)

from .limits import BF16, PACKED_BF16, PACKED_HEAD, layer_weights

BANDWIDTH = 50
"""In 1e9 bytes per second."""
INT4 = 4.25 / 8
"""Bytes of a 4-bit weight in the C kernels' format, in groups of 128 inputs."""
AWQ = (4 + (16 + 4) / 128) / 8
"""The same in a checkpoint: each group has a scale and a zero point."""


@dataclass(frozen=True, kw_only=True)
class VisionEncoder:
    """The matrices of a vision encoder.

    Attributes:
        gated: whether its MLPs have a gate.
        mergers: number of its mergers of 2x2 patches, with those of DeepStack.
        positions: number of learned position embeddings.
    """

    width: int
    inner: int
    depth: int
    gated: bool = False
    patch_size: int = 14
    mergers: int = 1
    positions: int = 0

    def weights(self, output: int) -> int:
        block = self.width * (4 * self.width + (3 if self.gated else 2) * self.inner)
        embedding = self.width * (3 * 2 * self.patch_size**2 + self.positions)
        merger = 4 * self.width * (4 * self.width + output)
        return self.depth * block + embedding + self.mergers * merger


@dataclass(frozen=True, kw_only=True)
class Format:
    """Bytes of a weight: in memory with the C kernels, and of the layers in a file, where all others have 16 bits."""

    layers: float
    vision: float
    head: float
    file: float


FORMATS = (
    Format(layers=PACKED_BF16, vision=PACKED_BF16, head=PACKED_BF16 + PACKED_HEAD, file=BF16),
    Format(layers=1, vision=1, head=1, file=1),
    Format(layers=INT4, vision=1, head=1, file=AWQ),
)
"""bfloat16; `--quantization int8`; AWQ with `--quantization int8`."""


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """Shapes of a model. Biases, norms and convolutions are left out, and the head that predicts several tokens."""

    text: TextModelSpec
    vision: VisionEncoder

    @property
    def layers(self) -> int:
        return layer_weights(replace(self.text, layers=tuple(map(_with_all_experts, self.text.layers))))

    @property
    def head(self) -> int:
        """Weights of the output layer, and of the embedding table, which it may share."""
        return self.text.vocab_size * self.text.hidden_size

    @property
    def parameters(self) -> int:
        tables = self.head if self.text.tie_word_embeddings else 2 * self.head
        return self.layers + tables + self.vision.weights(self.text.hidden_size)

    def memory(self, stored: Format) -> float:
        vision = stored.vision * self.vision.weights(self.text.hidden_size)
        return stored.layers * self.layers + vision + (BF16 + stored.head) * self.head

    def disk(self, stored: Format) -> float:
        return stored.file * self.layers + BF16 * (self.parameters - self.layers)

    def step_bytes(self, stored: Format) -> float:
        """Return the bytes that a greedy decode step reads: of a mixture, those of the experts of one token."""
        return stored.layers * layer_weights(self.text) + PACKED_HEAD * self.head


ROTARY = RotarySpec(theta=1e6, axes=())


def _text(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, *,
    vocabulary: int = 151_936, tied: bool = False, experts: ExpertsSpec | None = None,
) -> TextModelSpec:  # fmt: skip
    attention = AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=128, rotary=ROTARY)
    layer = LayerSpec(mixer=attention, mlp=experts or MlpSpec(intermediate_size=inner))
    return _of_layers(hidden, [layer] * layers, vocabulary=vocabulary, tied=tied)


def _hybrid(
    hidden: int, mlp: int | ExpertsSpec, layers: int, heads: int, kv_heads: int, *,
    value_heads: int, tied: bool = False,
) -> TextModelSpec:  # fmt: skip
    """Return a text model of Qwen3.5: three gated delta nets before each attention."""
    attention = AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=256, rotary=ROTARY, gate=True)
    delta_net = DeltaNetSpec(num_key_heads=16, num_value_heads=value_heads, key_dim=128, value_dim=128, conv_width=4)
    inner = mlp if isinstance(mlp, ExpertsSpec) else MlpSpec(intermediate_size=mlp)
    block = [LayerSpec(mixer=mixer, mlp=inner) for mixer in (delta_net, delta_net, delta_net, attention)]
    return _of_layers(hidden, block * (layers // 4), vocabulary=248_320, tied=tied)


def _of_layers(hidden: int, layers: Sequence[LayerSpec], *, vocabulary: int, tied: bool) -> TextModelSpec:
    return TextModelSpec(
        hidden_size=hidden, layers=tuple(layers), vocab_size=vocabulary, max_position_embeddings=32_768, norm_eps=1e-6,
        tie_word_embeddings=tied,
    )  # fmt: skip


def _with_all_experts(layer: LayerSpec) -> LayerSpec:
    if isinstance(layer.mlp, MlpSpec):
        return layer
    return replace(layer, mlp=replace(layer.mlp, experts_per_token=layer.mlp.num_experts))


LARGE = 152_064
"""Vocabulary of the larger models before Qwen3-VL."""
QWEN2 = VisionEncoder(width=1280, inner=5120, depth=32)
QWEN2_5 = VisionEncoder(width=1280, inner=3420, depth=32, gated=True)
QWEN2_5_LARGE = replace(QWEN2_5, inner=3456)
QWEN3_SMALL = VisionEncoder(width=1024, inner=4096, depth=24, patch_size=16, mergers=4, positions=48 * 48)
QWEN3 = replace(QWEN3_SMALL, width=1152, inner=4304, depth=27)
QWEN3_5_TINY = VisionEncoder(width=768, inner=3072, depth=12, patch_size=16, positions=48 * 48)
QWEN3_5_SMALL = replace(QWEN3_SMALL, mergers=1)
QWEN3_5 = replace(QWEN3, mergers=1)
A3B = ExpertsSpec(num_experts=128, experts_per_token=8, intermediate_size=768)
A22B = replace(A3B, intermediate_size=1536)
HYBRID_A3B = ExpertsSpec(num_experts=256, experts_per_token=8, intermediate_size=512, shared_intermediate_size=512)
A10B = replace(HYBRID_A3B, intermediate_size=1024, shared_intermediate_size=1024)
A17B = replace(A10B, num_experts=512, experts_per_token=10)

MODELS: Mapping[str, PublishedModel] = {
    "Qwen2-VL-2B": PublishedModel(text=_text(1536, 8960, 28, 12, 2, tied=True), vision=QWEN2),
    "Qwen2-VL-7B": PublishedModel(text=_text(3584, 18944, 28, 28, 4, vocabulary=LARGE), vision=QWEN2),
    "Qwen2-VL-72B": PublishedModel(text=_text(8192, 29568, 80, 64, 8, vocabulary=LARGE), vision=QWEN2),
    "Qwen2.5-VL-3B": PublishedModel(text=_text(2048, 11008, 36, 16, 2, tied=True), vision=QWEN2_5),
    "Qwen2.5-VL-7B": PublishedModel(text=_text(3584, 18944, 28, 28, 4, vocabulary=LARGE), vision=QWEN2_5),
    "Qwen2.5-VL-32B": PublishedModel(text=_text(5120, 27648, 64, 40, 8, vocabulary=LARGE), vision=QWEN2_5_LARGE),
    "Qwen2.5-VL-72B": PublishedModel(text=_text(8192, 29568, 80, 64, 8, vocabulary=LARGE), vision=QWEN2_5_LARGE),
    "Qwen3-VL-2B": PublishedModel(text=_text(2048, 6144, 28, 16, 8, tied=True), vision=QWEN3_SMALL),
    "Qwen3-VL-4B": PublishedModel(text=_text(2560, 9728, 36, 32, 8, tied=True), vision=QWEN3_SMALL),
    "Qwen3-VL-8B": PublishedModel(text=_text(4096, 12288, 36, 32, 8), vision=QWEN3),
    "Qwen3-VL-32B": PublishedModel(text=_text(5120, 25600, 64, 64, 8), vision=QWEN3),
    "Qwen3-VL-30B-A3B": PublishedModel(text=_text(2048, 6144, 48, 32, 4, experts=A3B), vision=QWEN3),
    "Qwen3-VL-235B-A22B": PublishedModel(text=_text(4096, 12288, 94, 64, 4, experts=A22B), vision=QWEN3),
    "Qwen3.5-0.8B": PublishedModel(text=_hybrid(1024, 3584, 24, 8, 2, value_heads=16, tied=True), vision=QWEN3_5_TINY),
    "Qwen3.5-2B": PublishedModel(text=_hybrid(2048, 6144, 24, 8, 2, value_heads=16, tied=True), vision=QWEN3_5_SMALL),
    "Qwen3.5-4B": PublishedModel(text=_hybrid(2560, 9216, 32, 16, 4, value_heads=32, tied=True), vision=QWEN3_5_SMALL),
    "Qwen3.5-9B": PublishedModel(text=_hybrid(4096, 12288, 32, 16, 4, value_heads=32), vision=QWEN3_5),
    "Qwen3.5-27B": PublishedModel(text=_hybrid(5120, 17408, 64, 24, 4, value_heads=48), vision=QWEN3_5),
    "Qwen3.5-35B-A3B": PublishedModel(text=_hybrid(2048, HYBRID_A3B, 40, 16, 2, value_heads=32), vision=QWEN3_5),
    "Qwen3.5-122B-A10B": PublishedModel(text=_hybrid(3072, A10B, 48, 32, 2, value_heads=64), vision=QWEN3_5),
    "Qwen3.5-397B-A17B": PublishedModel(text=_hybrid(4096, A17B, 60, 32, 2, value_heads=64), vision=QWEN3_5),
}


def model_table() -> str:
    """Return the table in Markdown."""
    titles = ("Model", "Parameters, 1e9", "RAM, GB", "Disk, GB", f"Tokens/s at {BANDWIDTH} GB/s")
    names: dict[str, list[str]] = {}
    for name, model in MODELS.items():
        names.setdefault(_cells(model), []).append(name)
    rows = (f"| {', '.join(equal)} | {cells} |" for cells, equal in names.items())
    return "\n".join([f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *rows])


def _cells(model: PublishedModel) -> str:
    cells = [[model.memory(stored) / 1e9 for stored in FORMATS], [model.disk(stored) / 1e9 for stored in FORMATS]]
    cells.append([BANDWIDTH * 1e9 / model.step_bytes(stored) for stored in FORMATS])
    texts = (" / ".join(map(_short, numbers)) for numbers in cells)
    return " | ".join([_short(model.parameters / 1e9), *texts])


def _short(number: float) -> str:
    return f"{number:.1f}" if number < 10 else f"{number:.0f}"


def main() -> None:
    print(model_table())


if __name__ == "__main__":
    main()
