"""The examples of the page about LoRA adapters print the documented output."""

from __future__ import annotations

import os

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise, importing it downloads prices

from dashinfer_vlm_core.engine.shared import close_shared
from tests.pages import check_programs


@pytest.mark.slow
def test_examples_print_documented_output(tmp_path, monkeypatch):
    from tests.litellm import conftest  # noqa: F401  imports LiteLLM without its warnings

    monkeypatch.chdir(tmp_path)
    check_programs("lora.md")
    close_shared()
