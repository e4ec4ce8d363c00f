"""The machine's throughput, and the resulting lower bounds of a model's times.

    python -m benchmarks.limits

prints the measured rates as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.kernels.bandwidth import measure_bandwidth
from dashinfer_vlm_core.kernels.choice import KernelSelector
from dashinfer_vlm_core.models.checkpoint import model_type
from dashinfer_vlm_core.models.memory import count_layer_weights
from dashinfer_vlm_core.models.patches import smart_resize
from dashinfer_vlm_core.models.qwen2_vl.config import VisionConfig, read_vision_config
from dashinfer_vlm_core.models.qwen2_vl.image_processor import DEFAULT_TOKENS
from dashinfer_vlm_core.models.spec import ModelSpec
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.text_spec import TextModelSpec
from dashinfer_vlm_cpu.native import NativeKernels
from dashinfer_vlm_qwen2_5_vl import config as qwen2_5_vl
from dashinfer_vlm_qwen3_vl import config as qwen3_vl
from dashinfer_vlm_qwen3_vl import qwen3_5

BF16 = 2.0
"""Bytes of a weight."""
PACKED_BF16 = 1.5
"""Bytes of a bfloat16 weight of a layer as stored by the C kernels."""
PACKED_HEAD = 1.0
"""Bytes of an output layer weight read in a greedy step by the C kernels."""
FEW = 16
"""Rows of a first measurement of kernels."""
TOO_SLOW = 10
"""Kernels that take this many times the time of the fastest for few rows are not measured further."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The throughput of this machine with all of its cores.

    Attributes:
        read_gb_s: memory read bandwidth, in 1e9 bytes per second.
        bf16_gflop_s: multiplications and additions of large bfloat16 matrices, in 1e9 per second, by the fastest
            available kernels.
        kernels: the name of those kernels.
    """

    read_gb_s: float
    bf16_gflop_s: float
    kernels: str


def cores() -> int:
    return len(os.sched_getaffinity(0))


def measure_rates() -> Rates:
    """Measure in a separate process, so that none of its threads remains during later measurements."""
    command = [sys.executable, "-m", "benchmarks.limits"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(cores())}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, cwd=Path(__file__).parent.parent
    )
    return Rates(**json.loads(done.stdout))


def qwen2_vision_flop(config: VisionConfig, patches: int) -> float:
    """Return the floating-point operations for one image of `patches` patches."""
    width, merged = config.hidden_size, config.merge_width
    columns = 3 * config.temporal_patch_size * config.patch_size**2
    matrices = width * (4 * width + 2 * config.intermediate_size)
    block = 2 * patches * matrices + 4 * patches**2 * width
    merger = 2 * (patches // config.spatial_merge_size**2) * merged * (merged + config.output_size)
    return float(config.depth * block + 2 * patches * columns * width + merger)


def qwen2_5_vision_flop(config: qwen2_5_vl.Qwen25VLVisionConfig, patches: int) -> float:
    """Return the floating-point operations of Qwen2.5-VL for one image of `patches` patches, in whole windows."""
    width, merged = config.hidden_size, config.merge_width
    columns = 3 * config.temporal_patch_size * config.patch_size**2
    linear = config.depth * 2 * patches * width * (4 * width + 3 * config.intermediate_size)
    full = len(config.fullatt_block_indexes)
    keys = full * patches + (config.depth - full) * min(patches, (config.window * config.spatial_merge_size) ** 2)
    merger = 2 * (patches // config.spatial_merge_size**2) * merged * (merged + config.output_size)
    return float(linear + 4 * patches * keys * width + 2 * patches * columns * width + merger)


def qwen3_vision_flop(config: qwen3_vl.Qwen3VLVisionConfig, patches: int) -> float:
    """Return the floating-point operations of Qwen3-VL for one image of `patches` patches, with all mergers."""
    width, merged = config.hidden_size, config.merge_width
    columns = 3 * config.temporal_patch_size * config.patch_size**2
    block = 2 * patches * width * (4 * width + 2 * config.intermediate_size) + 4 * patches**2 * width
    merger = 2 * (patches // config.spatial_merge_size**2) * merged * (merged + config.output_size)
    mergers = 1 + len(config.deepstack_layers)
    return float(config.depth * block + 2 * patches * columns * width + mergers * merger)


def vision_flop(model: Path, patches: int) -> float:
    """Return the floating-point operations of a checkpoint's vision encoder for one image of `patches` patches."""
    family = model_type(model)
    if family == qwen2_5_vl.MODEL_TYPE:
        return qwen2_5_vision_flop(qwen2_5_vl.read_vision_config(model), patches)
    if family in qwen3_vl.HYBRID_TYPES:
        return qwen3_vision_flop(qwen3_5.read_vision_config(model), patches)
    if family in qwen3_vl.MODEL_TYPES:
        return qwen3_vision_flop(qwen3_vl.read_vision_config(model), patches)
    return qwen2_vision_flop(read_vision_config(model), patches)


def load_spec(model: Path) -> ModelSpec:
    return load_plugins().family_of(model).load_spec(model)


def layers_flop(config: TextModelSpec, tokens: int) -> float:
    """Return the floating-point operations of all layers for a prompt of `tokens` tokens; attention is causal."""
    attention = 2 * tokens**2 * config.attention.width * config.num_attention_layers
    return float(2 * tokens * count_layer_weights(config) + attention)


def prefill_flop(config: TextModelSpec, tokens: int) -> float:
    """Return the floating-point operations to prefill a prompt of `tokens` tokens, with the output layer."""
    return layers_flop(config, tokens) + 2 * config.vocab_size * config.hidden_size


def step_bytes(config: TextModelSpec, *, packed: bool) -> float:
    """Return the bytes of weights read in one greedy decode step of one response: all layers and the output layer.

    Args:
        config: the text model.
        packed: in the formats of the C kernels; otherwise bfloat16.
    """
    layer, head = (PACKED_BF16, PACKED_HEAD) if packed else (BF16, BF16)
    return layer * count_layer_weights(config) + head * config.vocab_size * config.hidden_size


def image_patches(model: Path, side: int = 448) -> int:
    """Return the number of patches of a resized square image."""
    pixels = load_spec(model).pixels
    max_pixels = min(pixels.max_pixels, DEFAULT_TOKENS * pixels.factor**2)
    height, width = smart_resize(side, side, factor=pixels.factor, min_pixels=pixels.min_pixels, max_pixels=max_pixels)
    return height * width // pixels.patch_size**2


def image_seconds(model: Path, rates: Rates, *, prompt: int) -> float:
    """Return the minimum seconds to the first token for an image and a prompt of `prompt` tokens."""
    flop = vision_flop(model, image_patches(model)) + prefill_flop(load_spec(model).text, prompt)
    return flop / (rates.bf16_gflop_s * 1e9)


def step_seconds(model: Path, rates: Rates) -> float:
    """Return the minimum seconds of a greedy decode step: its weights have to be read."""
    packed = native_kernels() is not None
    return step_bytes(load_spec(model).text, packed=packed) / (rates.read_gb_s * 1e9)


def native_kernels() -> NativeKernels | None:
    """Return the C kernels that engines use here: the fastest set, unless the environment restricts it."""
    import torch

    kernels = KernelSelector(load_plugins().kernels.values(), EngineConfig()).find("cpu", torch.bfloat16).kernels
    return kernels if isinstance(kernels, NativeKernels) else None


def _best(work: Callable[[], object], seconds: float = 1.0) -> float:
    """Return the shortest time of all runs that fit into `seconds`, after a warm-up."""
    work()
    end, best = time.perf_counter() + seconds, float("inf")
    while best == float("inf") or time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def main() -> None:
    import torch

    matrix = torch.randn(4096, 4096).to(torch.bfloat16)
    layers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"torch": lambda rows: torch.mm(rows, matrix)}
    ours = native_kernels()
    if ours:
        layers[ours.name] = ours.linear(matrix)
    with torch.inference_mode():
        # Without AVX-512, PyTorch has a loop for bfloat16 that would take minutes.
        few = {name: _best(partial(work, matrix[:FEW]), seconds=0) for name, work in layers.items()}
        fast = [name for name in layers if few[name] < TOO_SLOW * min(few.values())]
        products = {name: _best(partial(layers[name], matrix)) for name in fast}
    fastest = min(products, key=products.__getitem__)
    rates = Rates(
        read_gb_s=measure_bandwidth() / 1e9, bf16_gflop_s=2 * 4096**3 / products[fastest] / 1e9, kernels=fastest
    )
    print(json.dumps(asdict(rates)))


if __name__ == "__main__":
    main()
