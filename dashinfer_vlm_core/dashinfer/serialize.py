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
stand between them. Beside `worker.py`, this file imports nothing of ours, for it runs under another interpreter
(CPython 3.8 or 3.10).
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
    load_libraries(*sys.argv[2:])
    tell(0, "reading")
    state = read(job)
    tell(0.5, "writing")
    write(job, state)
    tell(1, "done")


def load_libraries(*stubs: str) -> None:
    """What the extension links, by path, as the worker does it."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
    spec = importlib.util.spec_from_file_location("worker", path)
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    worker.load_libraries(*stubs)


def tell(progress: float, what: str) -> None:
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


class Unused(types.ModuleType):
    """Stands in for transformers, which DashInfer imports for a loader of its own: that would take twice as long as the
    rest, and tie this to the versions that it knows.
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
        quant_config=quantisation(allspark, job),
        rotary_base=job["config"]["rope_theta"],
    )


def quantisation(allspark: Any, job: dict[str, Any]) -> Any:
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
