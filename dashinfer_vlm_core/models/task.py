"""Find the task of a checkpoint, and how its hidden states are pooled, in the files of sentence-transformers and
transformers.

    modules.json                     the modules after the model: Pooling and Normalize, or LogitScore
    1_Pooling/config.json            which hidden states are pooled; the folder is named in modules.json
    1_LogitScore/config.json         the tokens whose logits are compared
    config_sentence_transformers.json   the default instruction
    config.json                      the architecture; `matryoshka_dimensions`, or `is_matryoshka`; vLLM's
                                     `classifier_from_token`
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Literal

from ..errors import CheckpointError, ConfigError
from ..tokenization.tokenizer import TokenizerCache
from .json_fields import CONFIG, JsonFields, read_fields
from .pooling import PoolingSpec, Task, TokenContrast
from .retrieval import is_retrieval, read_retrieval
from .spec import ModelSpec

EMBED_INSTRUCTION = "Represent the user's input."
SCORE_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
"""The default instructions of the published code of Qwen3-VL-Embedding and Qwen3-VL-Reranker."""

SEQUENCE_CLASSIFICATION = "ForSequenceClassification"
CLASSIFIER = "score"
"""The name of the linear layer of an architecture for sequence classification in transformers."""
CLASSIFIER_TOKENS = "classifier_from_token"
"""The field of checkpoints without that layer, whose scores are computed from two rows of the output layer."""

logger: logging.Logger = logging.getLogger(__name__)

_MODULES = "modules.json"
_SENTENCE_TRANSFORMERS = "config_sentence_transformers.json"
_TASK_STEP = "Use another checkpoint, or set `task` to generate."


def read_pooling(
    spec: ModelSpec, task: Literal["auto"] | Task, tokenizers: TokenizerCache | None = None
) -> PoolingSpec | None:
    """Read how the hidden states of a checkpoint are pooled; None if it generates text.

    Args:
        spec: the checkpoint.
        task: the task; `auto` finds it. A model with late interaction scores with the embeddings of tokens.
        tokenizers: reads the tokenizer of a checkpoint that does not name its tokens for scores.

    Raises:
        CheckpointError: a file is invalid, or requires another way of pooling.
        ConfigError: the checkpoint cannot be used for the task.
    """
    if task == "generate":
        return None
    modules = _read_modules(spec.folder)
    config = read_fields(spec.folder / CONFIG)
    if task in {"auto", "score"} and is_retrieval(config):
        task = "token_embed"
    elif task == "auto":
        task = _find_task(modules, config)
    if task == "generate":
        return None
    if task == "token_embed":
        return read_retrieval(spec, config)
    if task == "score":
        return PoolingSpec(
            task="score",
            instruction=_instruction(spec.folder, SCORE_INSTRUCTION),
            head=_score_head(spec, modules, config, tokenizers or TokenizerCache()),
        )
    if pooling := modules.get("Pooling"):
        _check_pooling(read_fields(pooling / CONFIG))
    return PoolingSpec(
        task="embed",
        instruction=_instruction(spec.folder, EMBED_INSTRUCTION),
        normalize="Normalize" in modules or "Pooling" not in modules,
        dimensions=_dimensions(spec, config, is_published="Pooling" in modules),
    )


def _find_task(modules: Mapping[str, Path], config: JsonFields) -> Task:
    if "LogitScore" in modules or _classifies(config):
        return "score"
    return "embed" if "Pooling" in modules else "generate"


def _classifies(config: JsonFields) -> bool:
    architectures = config.get("architectures")
    return isinstance(architectures, list) and any(
        str(name).endswith(SEQUENCE_CLASSIFICATION) for name in architectures
    )


def _read_modules(folder: Path) -> dict[str, Path]:
    """Return the folder of each module of sentence-transformers by its class; none without such modules.

    Raises:
        CheckpointError: the file is invalid, or has a module that is not supported.
    """
    file = folder / _MODULES
    if not file.is_file():
        return {}
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        modules = {str(row["type"]).rpartition(".")[2]: folder / row["path"] for row in rows}
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{file} is not a list of objects with `type` and `path`: {error!r}. Download the published file again."
        ) from None
    for name in modules:
        if name not in {"Transformer", "Pooling", "Normalize", "LogitScore"}:
            raise CheckpointError(f"{file} has a module {name!r}, which is not supported. {_TASK_STEP}")
    return modules


def _check_pooling(pooling: JsonFields) -> None:
    """Check that the hidden state of the last token is pooled. Older files have a flag for each way of pooling."""
    given = pooling.get("pooling_mode")
    modes = {given} if given else {name for name, value in pooling.values.items() if value is True}
    modes = {name.removeprefix("pooling_mode_") for name in modes} - {"include_prompt"}
    if modes != {"lasttoken"}:
        pooling.fail("pooling_mode", f"must be 'lasttoken', got {', '.join(sorted(modes)) or 'none'}", _TASK_STEP)


def _score_head(
    spec: ModelSpec, modules: Mapping[str, Path], config: JsonFields, tokenizers: TokenizerCache
) -> TokenContrast | str:
    if folder := modules.get("LogitScore"):
        file = folder / CONFIG
        tokens = read_fields(file) if file.is_file() else None
        if tokens and tokens.get("true_token_id") is not None:
            return _contrast(spec, tokens.integer("true_token_id"), tokens.integer("false_token_id"))
        # Uploads of rerankers with a wrong path in modules.json were published: discussion 11 of Qwen3-VL-Reranker-8B.
        logger.warning("%s does not name the tokens that scores compare: yes and no are used.", file)
    if config.get(CLASSIFIER_TOKENS) is not None:
        return _classifier_contrast(spec, config, tokenizers)
    if _classifies(config):
        return CLASSIFIER
    vocabulary = tokenizers.read(spec.folder).backend
    return _contrast(spec, vocabulary.token_to_id("yes"), vocabulary.token_to_id("no"))


def _classifier_contrast(spec: ModelSpec, config: JsonFields, tokenizers: TokenizerCache) -> TokenContrast:
    """Return the tokens that vLLM converts to the linear layer of a classifier: the false one, then the true one."""
    texts = config.get(CLASSIFIER_TOKENS)
    if not isinstance(texts, list) or len(texts) != 2 or not all(isinstance(text, str) for text in texts):
        config.fail_value(CLASSIFIER_TOKENS, "must be two tokens, such as no and yes")
    vocabulary = tokenizers.read(spec.folder).backend
    false, true = map(vocabulary.token_to_id, texts)
    if false is None or true is None:
        config.fail_value(CLASSIFIER_TOKENS, "must be tokens of the vocabulary")
    return _contrast(spec, true, false)


def _contrast(spec: ModelSpec, true: int | None, false: int | None) -> TokenContrast:
    if true is None or false is None or max(true, false) >= spec.vocab_size:
        raise ConfigError(
            f"`task` score: {spec.folder.name} has no tokens 'yes' and 'no', nor a {_MODULES} that names others."
            " Use a checkpoint that was trained to score documents.",
            param="task",
        )
    return TokenContrast(true, false)


def _instruction(folder: Path, default: str) -> str:
    file = folder / _SENTENCE_TRANSFORMERS
    if not file.is_file():
        return default
    fields = read_fields(file)
    prompts: Any = fields.get("prompts") or {}
    chosen = prompts.get(fields.get("default_prompt_name")) if isinstance(prompts, dict) else None
    return chosen if isinstance(chosen, str) and chosen.strip() else default


def _dimensions(spec: ModelSpec, config: JsonFields, *, is_published: bool) -> Container[int]:
    listed = config.get("matryoshka_dimensions")
    if isinstance(listed, list):
        return tuple(size for size in listed if type(size) is int and 0 < size <= spec.hidden_size)
    if config.flag("is_matryoshka"):
        return range(1, spec.hidden_size + 1)
    if is_published and spec.min_dimensions:
        return range(spec.min_dimensions, spec.hidden_size + 1)
    return ()
