"""Writes a language model in DashInfer's format. Runs in DashInfer's own environment, as a program of one file.

    python -I serialize.py JOB.json [STUBS]

The job, written by `convert.py`:

    name       the files become NAME.asgraph and NAME.asparam
    folder     where to write them
    dtype      float32, bfloat16 or float16
    weights    none, int8 or uint4: how they are stored
    split      whether several devices will share the weights
    tensors    published name -> [safetensors file, name in it]
    tied       whether the output layer is the embedding table
    config     the text model's configuration, in Hugging Face's words and DashInfer's

Progress goes to standard output, as one JSON object per line that begins with `{"progress":`; DashInfer's own prints
stand between them. Apart from `worker.py` and `torch_placeholder.py`, this file imports nothing of ours, for it runs
under another interpreter (CPython 3.8 or 3.10).

In an environment for the CPU only there is no torch: `torch_placeholder.py` takes its place, for float32 alone. What is
written is the same, byte for byte.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from typing import Any

GROUPS = {"int8": -1, "uint4": 128}
"""Consecutive weights that share a scale; -1 for a whole channel."""


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    worker = load_program("worker")
    worker.load_libraries(*sys.argv[2:])
    report(0, "reading")
    state = read_without_torch(job) if worker.is_cpu_only() else read(job)
    report(0.5, "writing")
    write(job, state)
    report(1, "done")


def load_program(name: str) -> Any:
    """The module in the file NAME.py in the folder of this one."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(progress: float, what: str) -> None:
    print(json.dumps({"progress": progress, "what": what}), flush=True)


def read(job: dict[str, Any]) -> dict[str, Any]:
    """The language model's tensors by published name, in the number type of the job."""
    import torch
    from safetensors import safe_open

    dtype = getattr(torch, job["dtype"])
    state = {}
    for name, (path, stored) in job["tensors"].items():
        with safe_open(path, framework="pt") as file:
            state[name] = file.get_tensor(stored).to(dtype)
    if job["tied"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def read_without_torch(job: dict[str, Any]) -> dict[str, Any]:
    """The same tensors, each read from its file when it is written; puts the placeholders in the place of torch."""
    if job["dtype"] != "float32" or job["weights"] != "none":
        raise SystemExit("DashInfer is installed for the CPU only: it converts to float32 alone, without quantization.")
    torch = load_program("torch_placeholder")
    for name in ("safetensors", "safetensors.torch"):
        sys.modules[name] = Unused(name)
    sys.modules.update({"torch": torch, "torch.cuda": torch.cuda})
    files = {path: torch.SafetensorsFile(path) for path, _ in job["tensors"].values()}
    state = {name: files[path].tensor(stored) for name, (path, stored) in job["tensors"].items()}
    if job["tied"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


class Unused(types.ModuleType):
    """Takes the place of a module that DashInfer imports for a loader of its own, which is not used here. Importing
    transformers would take twice as long as the rest, and tie this to the versions that DashInfer knows.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def write(job: dict[str, Any], state: dict[str, Any]) -> None:
    sys.modules["transformers"] = Unused("transformers")
    from dashinfer import allspark

    allspark.Engine().serialize_model_from_torch(
        job["name"],
        "Qwen_v20",
        state,
        job["config"],
        save_dir=job["folder"],
        data_type=job["dtype"],
        derive_type="lmhead",
        multigpu_mode=int(job["split"]),
        do_binary_add_fused=True,
        do_dynamic_quantize_convert=job["weights"] != "none",  # without it, quant_config is ignored in silence
        quant_config=quantization(allspark, job),
        rotary_base=job["config"]["rope_theta"],
    )


def quantization(allspark: Any, job: dict[str, Any]) -> Any:
    """DashInfer's description of weights that are quantised as they are written; None if they are not."""
    if job["weights"] == "none":
        return None
    settings = allspark.IQSettings(
        {
            "quant_method": "instant_quant",
            "weight_format": job["weights"],
            "compute_method": "weight_only",
            "group_size": GROUPS[job["weights"]],
        }
    )
    return settings.to_as_quant_config(job["dtype"], job["weights"])


if __name__ == "__main__":
    main()
