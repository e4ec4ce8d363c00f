"""Engines that compute embeddings of images and texts, and the checkpoints for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from .checkpoint_files import linked_copy, write_json
from .compare import IN_PROCESS, OURS
from .engines import Launch, other_engine, ours
from .environments import OPENVINO, SENTENCE_TRANSFORMERS, VLLM, OtherEngines
from .limits import cores
from .models import checkpoint

OTHERS = ("vllm", "openvino", "sentence-transformers")
ENGINES = (*(name for name in OURS if name != IN_PROCESS), *OTHERS)
DEFAULT = ("ours", *OTHERS)
MODULES = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
TRANSFORMER = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": FORWARD, "image": FORWARD, "message": {**FORWARD, "format": "structured"}},
    "module_output_name": "token_embeddings",
    "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
}
"""How sentence-transformers calls the model; without it, it accepts text only."""


def embedding_launch(name: str, model: Path, other_engines: OtherEngines, max_pixels: int) -> Launch:
    """Return the launch of a server with vLLM's `/v1/embeddings`, after installing the engine.

    Args:
        name: one of `ENGINES`.
        model: the checkpoint's folder.
        other_engines: where other engines are installed.
        max_pixels: the largest image, which no engine scales down.

    Raises:
        SetupMissing: the engine cannot be installed here, or cannot convert the model.
    """
    if name in OURS:
        return ours(name, str(model), *OURS[name], "--max-pixels", str(max_pixels))
    if name == "vllm":
        launch = other_engine(name, model, other_engines, max_pixels=max_pixels)
        # The last option counts: with 2,048 tokens in a step, a page would take two.
        pooling = ("--runner", "pooling", "--convert", "embed", "--max-num-batched-tokens", "4096")
        return replace(launch, command=(*launch.command, *pooling), note=f"{VLLM[0]}, pooling runner, bfloat16")
    if name == "openvino":
        python = other_engines.openvino()
        exported = other_engines.exported_for_embeddings(model, max_pixels)
        script = str(other_engines.script("openvino_embedding_server.py"))
        command = (str(python), script, str(exported), "{port}", str(cores()))
        return Launch(name=name, command=command, note=f"{OPENVINO[0]}, EmbeddingPipeline, texts in batches")
    python = other_engines.sentence_transformers()
    script = str(other_engines.script("sentence_transformers_server.py"))
    command = (str(python), script, str(model), "{port}", str(max_pixels))
    note = f"{SENTENCE_TRANSFORMERS[0]}, encode() over the waiting requests, bfloat16"
    return Launch(name=name, command=command, note=note)


def embedding_checkpoint(name: str, folder: Path) -> Path:
    """Return the folder of a model for embeddings: `name` itself if it has `modules.json`, or a copy with links."""
    base = checkpoint(name, folder)
    if (base / "modules.json").exists():
        return base
    return linked_copy(base, folder.expanduser() / f"{base.name}-embedding", _write_modules)


def _write_modules(folder: Path) -> None:
    """Write the files of sentence-transformers: the hidden state of the last token, divided by its length."""
    rows = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(MODULES.items())
    ]
    write_json(folder / "modules.json", rows)
    write_json(folder / "sentence_bert_config.json", TRANSFORMER)
    for path in filter(None, MODULES):
        (folder / path).mkdir()
    config = json.loads((folder / "config.json").read_text())
    size = config.get("text_config", config)["hidden_size"]
    write_json(folder / "1_Pooling" / "config.json", {"embedding_dimension": size, "pooling_mode": "lasttoken"})
    write_json(folder / "2_Normalize" / "config.json", {})
