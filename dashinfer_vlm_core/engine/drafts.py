"""Find the model, or the head, that drafts tokens for another model."""

from __future__ import annotations

from dataclasses import replace

from ..config import EngineConfig
from ..errors import CheckpointError, ConfigError, PluginError
from ..models.checkpoint import find_model
from ..models.eagle import is_eagle, read_eagle
from ..models.spec import ModelSpec
from ..plugins import Registry
from ..tokenization.tokenizer import TokenizerCache

_STEP = "Set `speculative_model` to a smaller model of the same family, or to an EAGLE-3 head for it, or remove it."


def with_draft(spec: ModelSpec, config: EngineConfig, registry: Registry, tokenizers: TokenizerCache) -> ModelSpec:
    """Return a model's spec with the draft model or head that `speculative_model` names, if it names one.

    A model ID that is not in the cache is downloaded.

    Raises:
        CheckpointError: there is no such model, or its configuration is invalid.
        ConfigError: it cannot draft for the model.
    """
    if config.speculative_model is None:
        return spec
    if spec.pooling:
        raise _unsuitable(f"{config.model} does not generate text")
    try:
        folder = find_model(config.speculative_model, registered=registry.models)
        if is_eagle(folder):
            return replace(spec, draft=read_eagle(folder, spec.text))
        draft = registry.load_spec(folder)
        vocabulary = tokenizers.read(folder).backend.get_vocab()
    except (CheckpointError, PluginError) as error:
        message = error.message.replace("`model`", "`speculative_model`")
        raise CheckpointError(f"`speculative_model`: {message}", param="speculative_model") from error
    if vocabulary != tokenizers.read(spec.folder).backend.get_vocab():
        raise _unsuitable(f"the tokens of its tokenizer are not those of {config.model}")
    if draft.text.delta_net:
        raise _unsuitable("it has gated delta nets, whose states are not kept for drafts")
    return replace(spec, draft=draft)


def _unsuitable(reason: str) -> ConfigError:
    return ConfigError(f"`speculative_model` cannot be used: {reason}. {_STEP}", param="speculative_model")
