"""LangChain model profiles, which do not require the model to be loaded."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from langchain_core.language_models.model_profile import ModelProfile

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders import GUIDED_DECODING
from dashinfer_vlm_core.engine import Engine
from dashinfer_vlm_core.models.spec import ModelSpec, Profile
from dashinfer_vlm_core.plugins import load_plugins


def profile_of(source: object) -> ModelProfile | None:
    """Return the profile of an engine or of an engine configuration; None for a server, whose model is unknown."""
    config = source.config if isinstance(source, Engine) else source
    if not isinstance(config, EngineConfig):
        return None
    spec = _spec_of(config.model)
    lengths = [length for length in (config.max_model_len, spec and spec.max_model_len) if length]
    length = min(lengths, default=None)
    sizes = ModelProfile(max_input_tokens=length, max_output_tokens=length) if length else ModelProfile()
    profile = spec.profile if spec else Profile()
    return ModelProfile(**sizes, **_capabilities(profile, structured_output=_supports_guided_decoding(config.decoder)))


@lru_cache(maxsize=64)
def _spec_of(model: str) -> ModelSpec | None:
    """Return the specification of a checkpoint; None for a Hugging Face model ID, which may not be downloaded yet."""
    registry = load_plugins()
    folder = registry.models.get(model, Path(model).expanduser())
    return registry.load_spec(folder) if folder.is_dir() else None


def _supports_guided_decoding(decoder: str) -> bool:
    """Return whether a decoder supports guided decoding. Automatically selected decoders do."""
    factory = load_plugins().decoders.get(decoder)
    return factory is None or GUIDED_DECODING in factory.supported_params


def _capabilities(profile: Profile, *, structured_output: bool) -> ModelProfile:
    return ModelProfile(
        text_inputs=True,
        image_inputs=profile.images,
        image_url_inputs=profile.images,
        video_inputs=profile.videos,
        image_tool_message=profile.images,
        audio_inputs=False,
        pdf_inputs=False,
        pdf_tool_message=False,
        text_outputs=True,
        image_outputs=False,
        audio_outputs=False,
        video_outputs=False,
        reasoning_output=profile.reasoning,
        tool_calling=profile.tools,
        tool_choice=profile.tools and structured_output,
        tool_call_streaming=profile.tools,
        structured_output=structured_output,
        temperature=True,
    )
