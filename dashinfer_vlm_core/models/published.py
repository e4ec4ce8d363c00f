"""The shapes of the published Qwen-VL models, from their `config.json`: what fits a machine is known before a download.

Biases, norms and convolutions are left out, and the heads that predict several tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..text_spec import AttentionSpec, DeltaNetSpec, ExpertsSpec, LayerSpec, MlpSpec, RotarySpec, TextModelSpec
from .memory import ModelSize, count_weights


@dataclass(frozen=True, kw_only=True, slots=True)
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
        """Return the number of weights if a visual token has `output` values."""
        block = self.width * (4 * self.width + (3 if self.gated else 2) * self.inner)
        embedding = self.width * (3 * 2 * self.patch_size**2 + self.positions)
        merger = 4 * self.width * (4 * self.width + output)
        return self.depth * block + embedding + self.mergers * merger


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


def _model(text: TextModelSpec, vision: VisionEncoder) -> ModelSize:
    vision_weights = vision.weights(text.hidden_size)
    size = ModelSize(
        text=text, vision_weights=vision_weights, context=text.max_position_embeddings, dtype="bfloat16", file_bytes=0
    )
    return replace(size, file_bytes=2 * count_weights(size))


def hub_id(name: str) -> str:
    """Return the Hugging Face model ID of one of `MODELS`."""
    return f"Qwen/{name}-Instruct" if "-VL-" in name else f"Qwen/{name}"


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

MODELS: Mapping[str, ModelSize] = {
    "Qwen2-VL-2B": _model(_text(1536, 8960, 28, 12, 2, tied=True), QWEN2),
    "Qwen2-VL-7B": _model(_text(3584, 18944, 28, 28, 4, vocabulary=LARGE), QWEN2),
    "Qwen2-VL-72B": _model(_text(8192, 29568, 80, 64, 8, vocabulary=LARGE), QWEN2),
    "Qwen2.5-VL-3B": _model(_text(2048, 11008, 36, 16, 2, tied=True), QWEN2_5),
    "Qwen2.5-VL-7B": _model(_text(3584, 18944, 28, 28, 4, vocabulary=LARGE), QWEN2_5),
    "Qwen2.5-VL-32B": _model(_text(5120, 27648, 64, 40, 8, vocabulary=LARGE), QWEN2_5_LARGE),
    "Qwen2.5-VL-72B": _model(_text(8192, 29568, 80, 64, 8, vocabulary=LARGE), QWEN2_5_LARGE),
    "Qwen3-VL-2B": _model(_text(2048, 6144, 28, 16, 8, tied=True), QWEN3_SMALL),
    "Qwen3-VL-4B": _model(_text(2560, 9728, 36, 32, 8, tied=True), QWEN3_SMALL),
    "Qwen3-VL-8B": _model(_text(4096, 12288, 36, 32, 8), QWEN3),
    "Qwen3-VL-32B": _model(_text(5120, 25600, 64, 64, 8), QWEN3),
    "Qwen3-VL-30B-A3B": _model(_text(2048, 6144, 48, 32, 4, experts=A3B), QWEN3),
    "Qwen3-VL-235B-A22B": _model(_text(4096, 12288, 94, 64, 4, experts=A22B), QWEN3),
    "Qwen3.5-0.8B": _model(_hybrid(1024, 3584, 24, 8, 2, value_heads=16, tied=True), QWEN3_5_TINY),
    "Qwen3.5-2B": _model(_hybrid(2048, 6144, 24, 8, 2, value_heads=16, tied=True), QWEN3_5_SMALL),
    "Qwen3.5-4B": _model(_hybrid(2560, 9216, 32, 16, 4, value_heads=32, tied=True), QWEN3_5_SMALL),
    "Qwen3.5-9B": _model(_hybrid(4096, 12288, 32, 16, 4, value_heads=32), QWEN3_5),
    "Qwen3.5-27B": _model(_hybrid(5120, 17408, 64, 24, 4, value_heads=48), QWEN3_5),
    "Qwen3.5-35B-A3B": _model(_hybrid(2048, HYBRID_A3B, 40, 16, 2, value_heads=32), QWEN3_5),
    "Qwen3.5-122B-A10B": _model(_hybrid(3072, A10B, 48, 32, 2, value_heads=64), QWEN3_5),
    "Qwen3.5-397B-A17B": _model(_hybrid(4096, A17B, 60, 32, 2, value_heads=64), QWEN3_5),
}
"""The models with 16 bits, by their names without owner and suffix."""
