"""What a model and its decoder support: for LangChain's profiles and LiteLLM's model information."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..config import EngineConfig
from ..config.folders import expand_user
from ..decoders import GUIDED_DECODING
from ..models.memory import ModelSize
from ..models.pooling import Task
from ..models.spec import ModelSpec, Profile
from ..models.task import read_pooling
from ..plugins import load_plugins
from ..tokenization.tokenizer import TokenizerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What an engine supports.

    Attributes:
        profile: the inputs and outputs of the model.
        max_model_len: maximum number of tokens of prompt and completion together; None if it is not known.
        guided_decoding: whether response formats and tool calls can be enforced.
        model_type: `model_type` of the checkpoint's `config.json`; empty if it is not known.
        task: what the model is used for.
        size: the size of the checkpoint; None if it is not known.
    """

    profile: Profile
    max_model_len: int | None
    guided_decoding: bool
    model_type: str = ""
    task: Task = "generate"
    size: ModelSize | None = None

    @property
    def tool_choice(self) -> bool:
        """Whether a tool call can be required."""
        return self.profile.tools and self.guided_decoding


def configured_capabilities(config: EngineConfig, tokenizers: TokenizerCache | None = None) -> Capabilities:
    """Return the capabilities of a configuration without loading the model.

    The profile of a Hugging Face model ID, which may not be downloaded yet, is that of most models.

    Args:
        config: the configuration.
        tokenizers: as of `read_pooling`.

    Raises:
        SetupError: the checkpoint is invalid.
    """
    spec = _spec_of(config.model)
    lengths = [length for length in (config.max_model_len, spec and spec.max_model_len) if length]
    return Capabilities(
        profile=spec.profile if spec else Profile(),
        max_model_len=min(lengths, default=None),
        guided_decoding=_supports_guided_decoding(config.decoder),
        model_type=spec.model_type if spec else "",
        task=_task_of(spec, config, tokenizers),
        size=ModelSize.of(spec) if spec else None,
    )


def _task_of(spec: ModelSpec | None, config: EngineConfig, tokenizers: TokenizerCache | None) -> Task:
    if spec is None:
        return "generate" if config.task == "auto" else config.task
    pooling = read_pooling(spec, config.task, tokenizers)
    return pooling.task if pooling else "generate"


@lru_cache(maxsize=64)
def _spec_of(model: str) -> ModelSpec | None:
    registry = load_plugins()
    folder = registry.models.get(model, expand_user(model))
    return registry.load_spec(folder) if folder.is_dir() else None


@lru_cache(maxsize=64)
def _supports_guided_decoding(decoder: str) -> bool:
    factory = load_plugins().decoders.get(decoder)
    return factory is None or GUIDED_DECODING in factory.supported_params
