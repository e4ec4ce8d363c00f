"""Write a language model in DashInfer's format. This program runs in DashInfer's environment.

    python -I serialize.py JOB.json

The job, written by `convert.py`:

    name            the files are NAME.asgraph and NAME.asparam
    folder          the folder to write them to
    dtype           float32, bfloat16 or float16
    quantization    none, int8 or uint4
    split           whether several devices share the weights
    tensors         published name -> [safetensors file, name in it]
    tied            whether the output layer is the embedding table
    config          the text model's configuration, with the keys of Hugging Face and of DashInfer

Apart from `worker.py` and `torch_placeholder.py`, this file imports nothing from this package, since it runs under
another interpreter (CPython 3.8 or 3.10).

A CPU-only environment and that of the kit have no torch. `torch_placeholder.py` replaces it, without quantization; the
files are equal byte for byte.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from typing import Any, Dict

GROUPS = {"int8": -1, "uint4": 128}
"""Number of consecutive weights that share a scale; -1 for a whole channel."""


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    worker = importlib.import_module("worker")
    worker.load_libraries()
    if worker.is_cpu_only() and (job["dtype"], job["quantization"]) != ("float32", "none"):
        raise SystemExit("DashInfer is installed for the CPU only: it converts only to float32, without quantization.")
    replace_modules(job)
    write(job)


def replace_modules(job: dict[str, Any]) -> None:
    """Replace modules that DashInfer imports and does not use here; also torch and safetensors if there is no torch.

    Importing transformers would take twice as long as the rest, and restrict it to DashInfer's versions.
    """
    sys.modules["transformers"] = Unused("transformers")
    if importlib.util.find_spec("torch"):
        return
    if job["quantization"] != "none":
        raise SystemExit(
            "DashInfer is installed without torch: it converts without quantization. Remove `quantization`."
        )
    torch = importlib.import_module("torch_placeholder")
    sys.modules.update({"torch": torch, "torch.cuda": torch.cuda, "safetensors": torch})
    sys.modules["safetensors.torch"] = Unused("safetensors.torch")


class Tensors(Dict[str, Any]):
    """The language model's tensors by published name, each of which is read when it is used."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch

        super().__init__(job["tensors"])
        self._dtype = getattr(torch, job["dtype"])
        if job["tied"]:
            self["lm_head.weight"] = job["tensors"]["model.embed_tokens.weight"]

    def __getitem__(self, name: str) -> Any:
        from safetensors import safe_open

        path, stored = super().__getitem__(name)
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(stored).to(self._dtype)


class Unused(types.ModuleType):
    """A module in which every name exists."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def write(job: dict[str, Any]) -> None:
    from dashinfer import allspark

    allspark.Engine().serialize_model_from_torch(
        job["name"],
        "Qwen_v20",
        Tensors(job),
        job["config"],
        save_dir=job["folder"],
        data_type=job["dtype"],
        derive_type="lmhead",
        multigpu_mode=int(job["split"]),
        do_binary_add_fused=True,
        do_dynamic_quantize_convert=job["quantization"] != "none",  # without it, quant_config is silently ignored
        quant_config=quantization(allspark, job),
        rotary_base=job["config"]["rope_theta"],
    )


def quantization(allspark: Any, job: dict[str, Any]) -> Any:
    """DashInfer's settings for quantization during conversion; None without quantization."""
    if job["quantization"] == "none":
        return None
    settings = allspark.IQSettings(
        {
            "quant_method": "instant_quant",
            "weight_format": job["quantization"],
            "compute_method": "weight_only",
            "group_size": GROUPS[job["quantization"]],
        }
    )
    return settings.to_as_quant_config(job["dtype"], job["quantization"])


if __name__ == "__main__":
    main()
