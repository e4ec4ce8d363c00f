"""Load what an engine runs: the model, the decoder and the stages around them."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..config import MIB, EngineConfig
from ..decoders import DRAFT_MODEL, LORA, POOLING, PREFIX_CACHE, DecoderFactory, DecoderSupport
from ..decoders.supervisor import Supervisor
from ..embedding_store import EmbeddingStoreOptions, open_store, redacted
from ..embedding_store.client import EmbeddingStoreClient
from ..errors import ConfigError, SetupError
from ..kernels.choice import KernelSelector
from ..kernels.threads import configure_threads
from ..media.decoder import MediaDecoder
from ..media.loader import MediaLoader
from ..media.video import select_readers
from ..media_workers import WorkerLimit, create_executor
from ..models.checkpoint import find_model
from ..models.eagle import EagleSpec
from ..models.task import read_pooling
from ..models.vision_key import vision_key
from ..plugins import Registry
from ..preprocessing.prompt import PromptBuilder
from ..structured_output.request_grammars import RequestGrammars
from ..tokenization.detokenizer import IncrementalDetokenizer
from ..tokenization.tokenizer import TokenizerCache
from ..vision import VisionService
from ..vision.media_uuids import MediaUuidCache
from .admission import CompletionCount, ConcurrencyLimiter
from .chat_pipeline import ChatPipeline
from .documents import DocumentExpander
from .drafts import with_draft
from .history import HistoryPrefill
from .inputs import InputPipeline
from .loras import LoraManager
from .observers import RequestObserver

if TYPE_CHECKING:
    from ..models.interface import ModelFamily, VisionEncoder
    from ..models.spec import ModelSpec

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the models of a process share.

    Attributes:
        worker_limit: that of media workers; None for that of the model.
        tokenizers: those that were read.
        completions: those that run or wait.
    """

    worker_limit: WorkerLimit | None = None
    tokenizers: TokenizerCache = field(default_factory=TokenizerCache)
    completions: CompletionCount = field(default_factory=CompletionCount)


async def load_pipeline(
    config: EngineConfig, registry: Registry, observer: RequestObserver, shared: Shared | None = None
) -> ChatPipeline:
    """Load the model and start the decoder.

    Args:
        config: what to load and how.
        registry: the plugins.
        observer: is notified of requests.
        shared: what it shares with other models.

    Raises:
        SetupError: the setup is incomplete or invalid; the message says how to fix it.
    """
    resolved = registry.resolve_options(config)
    pipeline = await asyncio.to_thread(_create_pipeline, resolved, registry, observer, shared or Shared())
    try:
        await pipeline.decoder.start()
        await pipeline.loras.load_all()
    except BaseException:
        await pipeline.close()
        raise
    return pipeline


def _create_pipeline(
    config: EngineConfig, registry: Registry, observer: RequestObserver, shared: Shared
) -> ChatPipeline:
    readers = select_readers(registry.video_readers, config)
    folder = find_model(config.model, registered=registry.models, revision=config.revision)
    family = registry.family_of(folder)
    spec = registry.load_spec(folder)
    spec = replace(spec, pooling=read_pooling(spec, config.task, shared.tokenizers))
    spec = with_draft(spec, config, registry, shared.tokenizers)
    _check_context_length(config, spec)
    _check_rotation(config, spec)
    logger.info("Model %s from %s, task %s.", config.name, folder, spec.task)
    # Before the decoder, which imports torch: the process that decodes media imports its libraries at the same time.
    processor = family.image_processor(spec, config)
    media_decoder = MediaDecoder(config=config, readers=readers, policy=spec.video.with_config(config))
    media_executor = create_executor(
        config,
        family=family,
        folder=folder,
        spec=spec,
        processor=processor,
        decoder=media_decoder,
        limit=shared.worker_limit,
    )
    configure_threads(config)
    kernels = KernelSelector(registry.kernels.values(), config)
    factory, reason = select_decoder(registry, spec, config)
    decoder = Supervisor(lambda: factory.create(spec, config, kernels), restarts=config.limits.decoder_restarts)
    prompts = PromptBuilder.load(
        spec, family.prompt_layout(spec), config, max_model_len=decoder.max_model_len, tokenizers=shared.tokenizers
    )
    spec = replace(spec, conversation=prompts.conversation)
    IncrementalDetokenizer(prompts.tokenizer)  # rejects one that is not byte-level now, not at the first request
    vision = _load_vision(family, spec, config, kernels, registry)
    media = MediaLoader(config, readers, policy=spec.video)
    inputs = InputPipeline(
        spec=spec,
        media=media,
        media_executor=media_executor,
        documents=DocumentExpander(
            config=config, spec=spec, media=media, executor=media_executor, processor=processor, prompts=prompts
        ),
        processor=processor,
        prompts=prompts,
        vision=vision,
        media_uuids=MediaUuidCache(vision, limit=config.limits.max_media_ids),
        observer=observer,
        video_pruning_rate=config.video_pruning_rate,
    )
    keeps_history = config.prefix_cache and PREFIX_CACHE in decoder.supported_params and prompts.supports_reasoning
    return ChatPipeline(
        name=config.name,
        decoder_reason=reason,
        limiter=ConcurrencyLimiter(config.max_batch_size + config.max_waiting, shared.completions),
        spec=spec,
        inputs=inputs,
        grammars=RequestGrammars(prompts.tokenizer, spec),
        decoder=decoder,
        loras=LoraManager(config, spec, decoder, partial(family.load_vision_encoder, spec, config, kernels)),
        history=HistoryPrefill(prompts, decoder, shared.completions) if keeps_history else None,
        observer=observer,
    )


def _check_context_length(config: EngineConfig, spec: ModelSpec) -> None:
    if config.max_model_len is not None and config.max_model_len > spec.max_model_len:
        raise ConfigError(
            f"`max_model_len` is {config.max_model_len}, but the model {config.name} supports at most"
            f" {spec.max_model_len} tokens. Lower it, or remove it.",
            param="max_model_len",
        )


def _check_rotation(config: EngineConfig, spec: ModelSpec) -> None:
    """Reject what was trained for the original hidden states of a checkpoint that `quantize --rotate` wrote."""
    if not spec.rotated:
        return
    rejected = [
        ("lora", "the LoRA adapters change", bool(config.lora)),
        ("speculative_model", "the EAGLE head reads", isinstance(spec.draft, EagleSpec)),
        ("task", f"the task {spec.task} returns", spec.pooling is not None),
    ]
    for param, use, is_used in rejected:
        if is_used:
            raise ConfigError(
                f"`{param}`: the hidden states of {config.name} are rotated, but {use} those of the original."
                " Remove it, or quantize the original without `--rotate`.",
                param=param,
            )


def _load_vision(
    family: ModelFamily, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector, registry: Registry
) -> VisionService:
    encoder = family.load_vision_encoder(spec, config, kernels)
    return VisionService(
        encoder,
        model_key=kernels.vision_name.encode(),
        cache_bytes=config.vision_cache_mib * MIB,
        batch_patches=encoder.batch_patches,
        store=open_vision_store(registry, family, spec, config, kernels=kernels, encoder=encoder),
    )


def open_vision_store(
    registry: Registry,
    family: ModelFamily,
    spec: ModelSpec,
    config: EngineConfig,
    *,
    kernels: KernelSelector,
    encoder: VisionEncoder,
) -> EmbeddingStoreClient | None:
    """Open the store that the options name; None if they name none. It need not be reachable yet.

    Computes a digest of the weights of the vision encoder, at about the speed of reading them.

    Args:
        registry: the plugins.
        family: the model family.
        spec: the checkpoint.
        config: the options.
        kernels: those that were chosen for `encoder`.
        encoder: the vision encoder, which is loaded.

    Raises:
        ConfigError: an option is invalid, or the store cannot be used on this machine.
        MissingDependency: an extra is not installed.
    """
    options = config.options_of(EmbeddingStoreOptions)
    if not options.embedding_store:
        return None
    secret = options.read_secret()
    # Imported by name, because it imports torch: packages that do not need torch import this module.
    codec = importlib.import_module("dashinfer_vlm_core.embedding_store.codec").EmbeddingCodec(
        encoder.adopt(np.zeros((1, spec.visual_width), np.float32)), secret=secret
    )
    key = vision_key(spec, config, kernels=kernels.vision_identity(), family=_family_identity(registry, family, spec))
    client = EmbeddingStoreClient(
        open_store(registry.embedding_stores, config),
        codec,
        model_key=key,
        secret=secret,
        timeout=config.limits.store_timeout,
    )
    logger.info("Embeddings are shared through %s.", redacted(options.embedding_store))
    return client


def _family_identity(registry: Registry, family: ModelFamily, spec: ModelSpec) -> str:
    # Owners are distributions with their versions.
    owners = [row.distribution for row in registry.rows if f"model family {spec.model_type}" in row.provides]
    return " ".join([type(family).__module__, type(family).__qualname__, *owners])


def select_decoder(registry: Registry, spec: ModelSpec, config: EngineConfig) -> tuple[DecoderFactory, str]:
    """Select the decoder; log it, and return its factory and the reason.

    Raises:
        PluginError: no decoder of the requested name is registered.
        SetupError: the requested decoder, or every decoder, cannot run here, or the selected one does not support an
            option of a plugin.
    """
    names = sorted(registry.decoders) if config.decoder == "auto" else [config.decoder]
    candidates = [(_check_support(registry.decoder(name), spec, config), registry.decoder(name)) for name in names]
    best, factory = max(candidates, key=lambda candidate: candidate[0].score, default=(None, None))
    if best is None or factory is None or best.score <= 0:
        reasons = (
            "; ".join(f"{factory.name}: {support.reason}" for support, factory in candidates) or "none is registered"
        )
        raise SetupError(f"No decoder can run here ({reasons}). `dashinfer-vlm plugins` lists what is installed.")
    for kind in registry.option_classes:
        config.options_of(kind).check(factory.name)
    others = {other.name: support for support, other in candidates if other is not factory}
    expected = {name: support for name, support in others.items() if support.is_expected}
    logger.info("Decoder %s: %s", factory.name, _selection_reason(best, expected))
    return factory, _selection_reason(best, others)


def _selection_reason(best: DecoderSupport, others: Mapping[str, DecoderSupport]) -> str:
    reasons = [f"{name}: {support.reason}" for name, support in others.items()]
    return " ".join([best.reason, *(["Not selected:"] if reasons else []), *reasons])


def _check_support(factory: DecoderFactory, spec: ModelSpec, config: EngineConfig) -> DecoderSupport:
    try:
        support = factory.check_support(spec, config)
    except Exception as error:  # one decoder that cannot run does not affect the others
        logger.exception("check_support of the decoder %s failed", factory.name)
        return DecoderSupport(score=0, reason=f"its check failed: {error}")
    if spec.pooling and POOLING not in factory.supported_params:
        reason = f"It does not support the task {spec.task} of this model. Use the decoder torch."
        return replace(support, score=0, reason=reason)
    if spec.draft and DRAFT_MODEL not in factory.supported_params:
        reason = "It does not use drafts of a model (`speculative_model`). Remove it, or use the decoder torch."
        return replace(support, score=0, reason=reason)
    if config.lora and LORA not in factory.supported_params:
        reason = (
            "It does not apply LoRA adapters (`lora`). Merge the adapter into a checkpoint, or use the decoder torch."
        )
        return replace(support, score=0, reason=reason)
    return support
