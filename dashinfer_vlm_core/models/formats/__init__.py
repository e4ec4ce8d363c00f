"""Formats of quantized checkpoints, as other projects publish them.

`interface` defines what a format implements; plugins register more in the `register_checkpoint_formats` hook.

    detection.py           `quantization_config` of `config.json` -> the format's reader
    awq.py  gptq.py        4 and 8 bits, packed into int32
    compressed_tensors.py  integers and FP8, of llm-compressor
    fp8.py                 FP8 with a scale per block, of Qwen and DeepSeek
    packing.py             unpacking and dequantization, shared by the formats

Importing this package is cheap: torch is imported when weights are read.
"""

from __future__ import annotations

from .awq import AwqFormat
from .compressed_tensors import CompressedTensorsFormat
from .fp8 import Fp8Format
from .gptq import GptqFormat
from .interface import CheckpointFormat

BUILTIN_FORMATS: tuple[CheckpointFormat, ...] = (AwqFormat(), GptqFormat(), CompressedTensorsFormat(), Fp8Format())
