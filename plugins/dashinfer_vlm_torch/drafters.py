"""Create the drafter of a model."""

from __future__ import annotations

import logging

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.kernels.quantization import INT8, Quantization
from dashinfer_vlm_core.kernels.types import Kernels
from dashinfer_vlm_core.models.eagle import RENAMES, EagleSpec
from dashinfer_vlm_core.models.spec import ModelSpec
from dashinfer_vlm_core.models.weights import Weights

from .drafter import Drafter
from .eagle_head import read_eagle_head
from .head_drafter import HeadDrafter
from .kernel_sampler import create_sampler
from .kv_cache import KVCache
from .model import Rotary, TextModel
from .model_drafter import ModelDrafter
from .text_model_reader import TextModelReader, open_converted

logger: logging.Logger = logging.getLogger(__name__)


def create_mtp_drafter(model: TextModel, cache: KVCache) -> Drafter | None:
    """Return the drafter of a model with a head for multi-token prediction, whose keys and values are in `cache`; None
    without such a head."""
    if model.mtp is None:
        return None
    logger.info("Tokens are drafted by the checkpoint's head for multi-token prediction where that pays.")
    sampler = create_sampler(model.kernels)
    return HeadDrafter(model, model.mtp, cache, reads="final", rotary=model.rotary, kernel_sampler=sampler)


def load_eagle_drafter(
    model: TextModel, cache: KVCache, spec: EagleSpec, config: EngineConfig, quantization: Quantization | None
) -> Drafter:
    """Load an EAGLE-3 head.

    Args:
        model: the model that it was trained for, which captures its layers.
        cache: the model's cache.
        spec: the head.
        config: that of the model.
        quantization: that of the model.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or a file is damaged.
    """
    kept = INT8 if quantization else None  # like the last layer of a model
    with (
        Weights(spec.folder, RENAMES) as weights,
        open_converted(weights, config, model.kernels, "EAGLE-3 head") as converted,
    ):
        reader = TextModelReader(
            weights, spec.text, model.kernels, model.device, model.dtype, converted, False, {}, kept
        )
        head = model.executor.run(lambda: read_eagle_head(reader, spec, vocab_size=model.config.vocab_size))
    logger.info("Tokens are drafted by the EAGLE-3 head in %s where that pays.", spec.folder)
    return HeadDrafter(
        model,
        head,
        KVCache(spec.text, cache.pool.shape[2], device=model.device, dtype=cache.pool.dtype),
        reads="captured",
        rotary=Rotary(spec.text.attention.rotary, spec.text.attention.head_dim, model.device),
        kernel_sampler=create_sampler(model.kernels),
    )


def load_model_drafter(
    model: TextModel,
    cache: KVCache,
    spec: ModelSpec,
    config: EngineConfig,
    *,
    kernels: Kernels,
    quantization: Quantization | None,
) -> Drafter:
    """Load a draft model.

    Args:
        model: the model that it drafts for.
        cache: the model's cache.
        spec: the draft model, of which only the text model is loaded.
        config: that of the model.
        kernels: those that run it.
        quantization: that of the model.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or a file is damaged.
    """
    with (
        Weights(spec.folder, spec.tensor_renames, spec.quantization) as weights,
        open_converted(weights, config, kernels, "text") as converted,
    ):
        draft = TextModel(
            weights,
            spec.text,
            kernels,
            device=model.device,
            dtype=model.dtype,
            quantization=quantization,
            cache_dtype=cache.pool.dtype,
            converted=converted,
        )
    logger.info("Tokens are drafted by the model in %s where that pays.", spec.folder)
    own = KVCache(spec.text, cache.pool.shape[2], device=model.device, dtype=cache.pool.dtype)
    return ModelDrafter(model, draft, own, kernel_sampler=create_sampler(kernels))
