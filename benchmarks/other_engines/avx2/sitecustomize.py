"""Make vLLM select its kernels for CPUs without AVX-512. vLLM queries torch, which reads the features of the CPU."""

import importlib.abc
import sys


class HideAvx512(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "vllm":
            sys.meta_path.remove(self)
            import torch

            for question in ("avx512_supported", "avx512_bf16_supported", "amx_tile_supported"):
                setattr(torch.cpu, f"_is_{question}", lambda: False)


sys.meta_path.insert(0, HideAvx512())
