"""Find out how the tokens of a ColQwen checkpoint are embedded, for late interaction (arXiv:2407.01449).

There are three layouts:

    transformers       `model_type` colqwen2; the fields of the model that it extends are in `vlm_config`
    colpali-engine     the files of the model that it extends, with an architecture such as ColQwen2_5
    Tomoro             `model_type` colqwen3, with the fields of Qwen3-VL

They differ in the name of the projection and in their prompts. `processor_config.json` can change the prompts, as in
transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import CheckpointError, ConfigError
from .files import stored_headers, stored_tensors
from .json_fields import JsonFields, read_fields
from .pooling import PoolingSpec, Projection, RetrievalFormat
from .spec import ModelSpec

ARCHITECTURE = re.compile(r"ColQwen(2|2_5|3)(ForRetrieval)?")
EXTENDED: Mapping[str, str] = {"colqwen2": "qwen2_vl", "colqwen2_5": "qwen2_5_vl", "colqwen3": "qwen3_vl"}
"""The `model_type` of the model that a retrieval model extends, unless `vlm_config` has it."""

PROJECTIONS = ("embedding_proj_layer", "custom_text_proj")
PROCESSOR = "processor_config.json"
MEDIA = "<|vision_start|><|image_pad|><|vision_end|>"

_END = "<|im_end|>"
_AUGMENTATION = "<|endoftext|>" * 10
_VISUAL_PROMPT = f"<|im_start|>user\n{MEDIA}Describe the image.{_END}<|endoftext|>"
"""The prompt of images in all processors, those of transformers, colpali-engine and Tomoro."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Texts:
    query_prefix: str = ""
    query_suffix: str = _AUGMENTATION
    document_suffix: str = ""


def extended_fields(config: JsonFields) -> JsonFields:
    """Return the fields of the model that a retrieval model extends; those of other models are returned unchanged.

    Raises:
        CheckpointError: `vlm_config` is not an object.
    """
    extended = EXTENDED.get(str(config.get("model_type")))
    if extended is None:
        return config
    if config.get("vlm_config") is None:
        return replace(config, values={**config.values, "model_type": extended})
    dtypes = {name: config.get(name) for name in ("dtype", "torch_dtype") if config.get(name) is not None}
    return config.section("vlm_config").with_defaults({"model_type": extended, **dtypes})


def is_retrieval(config: JsonFields) -> bool:
    """Return whether `config.json` is of a model with late interaction."""
    architectures = config.get("architectures")
    return config.get("model_type") in EXTENDED or (
        isinstance(architectures, list) and any(ARCHITECTURE.fullmatch(str(name)) for name in architectures)
    )


def read_retrieval(spec: ModelSpec, config: JsonFields) -> PoolingSpec:
    """Read how the tokens of a checkpoint are embedded.

    Args:
        spec: the checkpoint.
        config: its `config.json`.

    Raises:
        CheckpointError: a file is invalid, or has no projection of the right shape.
        ConfigError: the checkpoint was not trained for late interaction.
    """
    if not is_retrieval(config):
        raise ConfigError(
            f"`task` token_embed: {spec.folder.name} is not a ColQwen checkpoint. Use one that was trained for late"
            " interaction.",
            param="task",
        )
    return PoolingSpec(
        task="token_embed", instruction="", head=_read_projection(spec), format=_read_format(spec, config)
    )


def _read_projection(spec: ModelSpec) -> Projection:
    stored = stored_tensors(spec.folder, spec.tensor_renames)
    name = next((name for name in PROJECTIONS if f"{name}.weight" in stored), None)
    if name is None:
        raise CheckpointError(
            f"{spec.folder} has no tensor {' or '.join(f'{name}.weight' for name in PROJECTIONS)}. Download the"
            " checkpoint again, or set `task` to generate."
        )
    weight = f"{name}.weight"
    return Projection(name, stored_headers({weight: stored[weight]})[weight].shape[0])


def _read_format(spec: ModelSpec, config: JsonFields) -> RetrievalFormat:
    file = spec.folder / PROCESSOR
    processor = read_fields(file) if file.is_file() else JsonFields(file=file, values={})
    texts = _texts(spec, config)
    prompt = _text(processor, "visual_prompt_prefix", _VISUAL_PROMPT) + _text(processor, "visual_prompt_suffix", "")
    prefix, media, rest = prompt.partition(MEDIA)
    if not media or MEDIA in rest:
        processor.fail("visual_prompt_prefix", f"must contain {MEDIA} once, got {prompt!r}")
    text, end, suffix = rest.partition(_END)
    return RetrievalFormat(
        query_prefix=_text(processor, "query_prefix", texts.query_prefix),
        query_suffix=texts.query_suffix,
        document_suffix=texts.document_suffix,
        media_prefix=prefix,
        media_text=text,
        media_suffix=end + suffix,
    )


def _texts(spec: ModelSpec, config: JsonFields) -> _Texts:
    """Return the texts of the processor with which the model was published.

    ColQwen2 and ColQwen2.5 were trained with `Query: `, which newer versions of colpali-engine leave out.
    """
    if spec.model_type == EXTENDED["colqwen3"]:
        is_tomoro = config.get("model_type") == "colqwen3"
        return _Texts(document_suffix=_AUGMENTATION if is_tomoro else "")
    is_transformers = config.get("model_type") in EXTENDED
    return _Texts(query_prefix="Query: ", query_suffix=_AUGMENTATION + ("\n" if is_transformers else ""))


def _text(fields: JsonFields, name: str, default: str) -> str:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        fields.fail_value(name, "must be a text")
    return value
