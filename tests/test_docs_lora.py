"""The examples of the page about LoRA adapters run, with small adapters of a small model."""

from __future__ import annotations

import os

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise, importing it downloads prices

from dashinfer_vlm_core.engine.shared import close_shared
from tests.lora_folders import ATTENTION, write_lora
from tests.pages import page_programs


@pytest.mark.slow
def test_examples_run(tiny_checkpoint, tmp_path):
    from tests.litellm import conftest  # noqa: F401  imports LiteLLM without its warnings

    replaced = {"Qwen/Qwen2-VL-2B-Instruct": str(tiny_checkpoint)}
    for name in ("invoices", "charts"):
        replaced[f"/models/{name}"] = str(write_lora(tmp_path / name, tiny_checkpoint, ATTENTION))
    names: dict[str, object] = {}
    for program in page_programs("lora.md"):
        text = program
        for before, after in replaced.items():
            text = text.replace(before, after)
        exec(compile(text, "lora.md", "exec", dont_inherit=True), names)
    close_shared()
    assert [output.error for output in names["outputs"]] == [None] * 3
