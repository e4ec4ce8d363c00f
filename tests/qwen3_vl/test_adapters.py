"""Qwen3-VL is registered, and the adapters describe a checkpoint without loading it."""

from __future__ import annotations

import shutil

import litellm

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.engine.capabilities import configured_capabilities
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_langchain.profiles import profile_of
from dashinfer_vlm_litellm.model_info import register_model_info


def test_langchain_profile(dense):
    profile = profile_of(EngineConfig(model=str(dense)))
    assert (profile["max_input_tokens"], profile["image_inputs"], profile["video_inputs"]) == (2048, True, True)
    assert profile["tool_calling"]
    assert not profile["reasoning_output"]


def test_checkpoint_whose_template_has_reasoning_reports_it(dense, tmp_path):
    folder = shutil.copytree(dense, tmp_path / "thinking")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<think>\n")
    profile = profile_of(EngineConfig(model=str(folder)))
    assert profile["reasoning_output"]


def test_litellm_model_info(moe):
    register_model_info("dashinfer_vlm/tiny-qwen3", configured_capabilities(EngineConfig(model=str(moe))))
    info = litellm.get_model_info("dashinfer_vlm/tiny-qwen3")
    assert (info["max_input_tokens"], info["supports_vision"]) == (2048, True)


def test_both_families_are_registered():
    assert {"qwen3_vl", "qwen3_vl_moe"} <= set(load_plugins().families)
