"""LangChain model profiles, which do not require the model to be loaded."""

from __future__ import annotations

from langchain_core.language_models.model_profile import ModelProfile

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.engine import Engine
from dashinfer_vlm_core.engine.capabilities import configured_capabilities


def profile_of(source: object) -> ModelProfile | None:
    """Return the profile of an engine or of an engine configuration; None for a server, whose model is unknown."""
    config = source.config if isinstance(source, Engine) else source
    if not isinstance(config, EngineConfig):
        return None
    capabilities = configured_capabilities(config)
    profile = capabilities.profile
    result = ModelProfile(
        text_inputs=True,
        image_inputs=profile.images,
        image_url_inputs=profile.images,
        video_inputs=profile.videos,
        image_tool_message=profile.images,
        audio_inputs=False,
        pdf_inputs=profile.images,
        pdf_tool_message=profile.images,
        text_outputs=True,
        image_outputs=False,
        audio_outputs=False,
        video_outputs=False,
        reasoning_output=profile.reasoning,
        tool_calling=profile.tools,
        tool_choice=capabilities.tool_choice,
        tool_call_streaming=profile.tools,
        structured_output=capabilities.guided_decoding,
        temperature=True,
    )
    if capabilities.max_model_len:
        result["max_input_tokens"] = capabilities.max_model_len
        result["max_output_tokens"] = capabilities.max_model_len
    return result
