"""What LangChain's users can ask about a model before it is loaded."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from langchain_core.language_models.model_profile import ModelProfile

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.engine import Engine
from dashinfer_vlm_core.plugins import load_plugins


def profile_of(source: object) -> ModelProfile | None:
    """Of an engine, or of the configuration of one; None if it cannot be told without asking a server."""
    config = source.config if isinstance(source, Engine) else source
    if not isinstance(config, EngineConfig):
        return None
    length = _length(config)
    sizes = ModelProfile(max_input_tokens=length, max_output_tokens=length) if length else ModelProfile()
    return ModelProfile(**sizes, **_abilities(structured=config.decoder != "dashinfer"))


def _length(config: EngineConfig) -> int | None:
    """Tokens that prompt and answer may have together; None for a hub id, whose checkpoint may not be here yet."""
    known = _context_of(config.model)
    lengths = [length for length in (config.max_model_len, known) if length]
    return min(lengths, default=None)


@lru_cache(maxsize=64)
def _context_of(model: str) -> int | None:
    registry = load_plugins()
    folder = registry.models.get(model, Path(model).expanduser())
    return registry.architecture_of(folder).read(folder).max_model_len if folder.is_dir() else None


def _abilities(*, structured: bool) -> ModelProfile:
    """`structured` is whether the decoder can be held to a schema: DashInfer's cannot."""
    return ModelProfile(
        text_inputs=True,
        image_inputs=True,
        image_url_inputs=True,
        video_inputs=True,
        image_tool_message=True,
        audio_inputs=False,
        pdf_inputs=False,
        pdf_tool_message=False,
        text_outputs=True,
        image_outputs=False,
        audio_outputs=False,
        video_outputs=False,
        reasoning_output=False,
        tool_calling=True,
        tool_choice=structured,
        tool_call_streaming=True,
        structured_output=structured,
        temperature=True,
    )
