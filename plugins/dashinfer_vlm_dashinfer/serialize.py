"""Write a language model in DashInfer's format. This program runs in DashInfer's environment.

    python -I serialize.py JOB.json [STUBS]

The job, written by `convert.py`:

    name       the files are NAME.asgraph and NAME.asparam
    folder     the folder to write them to
    dtype      float32, bfloat16 or float16
    weights    none, int8 or uint4: the quantization
    split      whether several devices share the weights
    tensors    published name -> [safetensors file, name in it]
    tied       whether the output layer is the embedding table
    config     the text model's configuration, with the keys of Hugging Face and of DashInfer

Progress is written to standard output, one JSON object per line that begins with `{"progress":`, between DashInfer's
own output. Apart from `worker.py` and `torch_placeholder.py`, this file imports nothing from this package, since it
runs under another interpreter (CPython 3.8 or 3.10).

A CPU-only environment and that of the kit have no torch. `torch_placeholder.py` replaces it, without quantization; the
files are equal byte for byte.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from typing import Any

GROUPS = {"int8": -1, "uint4": 128}
"""Number of consecutive weights that share a scale; -1 for a whole channel."""


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    worker = load_program("worker")
    worker.load_libraries(*sys.argv[2:])
    report(0, "reading")
    if worker.is_cpu_only() and (job["dtype"], job["weights"]) != ("float32", "none"):
        raise SystemExit("DashInfer is installed for the CPU only: it converts only to float32, without quantization.")
    state = read(job) if importlib.util.find_spec("torch") else read_without_torch(job)
    report(0.5, "writing")
    write(job, state)
    report(1, "done")


def load_program(name: str) -> Any:
    """Load the module NAME.py from the folder of this file."""
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
    """Read the language model's tensors, by published name, in the job's dtype."""
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
    """Open the same tensors, each of which is read when it is written; installs the replacement for torch."""
    if job["weights"] != "none":
        raise SystemExit(
            "DashInfer is installed without torch: it converts without quantization. Remove `quantization`."
        )
    torch = load_program("torch_placeholder")
    for name in ("safetensors", "safetensors.torch"):
        sys.modules[name] = Unused(name)
    sys.modules.update({"torch": torch, "torch.cuda": torch.cuda})
    files = {path: torch.SafetensorsFile(path) for path, _ in job["tensors"].values()}
    dtype = getattr(torch, job["dtype"])
    state = {name: files[path].tensor(stored, dtype) for name, (path, stored) in job["tensors"].items()}
    if job["tied"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


class Unused(types.ModuleType):
    """Replaces a module that DashInfer imports for a loader that is not used here. Importing transformers would take
    twice as long as the rest, and restrict it to the versions that DashInfer supports.
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
        do_dynamic_quantize_convert=job["weights"] != "none",  # without it, quant_config is silently ignored
        quant_config=quantization(allspark, job),
        rotary_base=job["config"]["rope_theta"],
    )


def quantization(allspark: Any, job: dict[str, Any]) -> Any:
    """DashInfer's settings for quantization during conversion; None without quantization."""
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
