"""What LangChain's users can ask about a model before it is loaded."""

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
    """Of an engine, or of the configuration of one; None if it cannot be told without asking a server."""
    config = source.config if isinstance(source, Engine) else source
    if not isinstance(config, EngineConfig):
        return None
    spec = _spec_of(config.model)
    lengths = [length for length in (config.max_model_len, spec and spec.max_model_len) if length]
    length = min(lengths, default=None)
    sizes = ModelProfile(max_input_tokens=length, max_output_tokens=length) if length else ModelProfile()
    profile = spec.profile if spec else Profile()
    return ModelProfile(**sizes, **_abilities(profile, structured=_structured(config.decoder)))


@lru_cache(maxsize=64)
def _spec_of(model: str) -> ModelSpec | None:
    """What a checkpoint says about itself; None for a hub id, whose checkpoint may not be here yet."""
    registry = load_plugins()
    folder = registry.models.get(model, Path(model).expanduser())
    return registry.family_of(folder).load_spec(folder) if folder.is_dir() else None


def _structured(decoder: str) -> bool:
    """Whether a decoder can be held to a schema; those that are chosen by themselves can."""
    factory = load_plugins().decoders.get(decoder)
    return factory is None or GUIDED_DECODING in factory.supported_params


def _abilities(profile: Profile, *, structured: bool) -> ModelProfile:
    """`structured` is whether the decoder can be held to a schema."""
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
        reasoning_output=False,
        tool_calling=profile.tools,
        tool_choice=profile.tools and structured,
        tool_call_streaming=profile.tools,
        structured_output=structured,
        temperature=True,
    )
