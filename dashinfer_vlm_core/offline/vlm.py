"""VLM: offline inference for scripts and notebooks."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from ..config import EngineConfig, variable, variables_set
from ..engine import Engine
from ..engine.validation import pooling_of
from ..errors import ConfigError, DashInferVLMError
from ..preprocessing.retrieval import IS_QUERY
from ..protocol import LoRARequest, OfflineRequest, ScoreRequest
from ..protocol.validation_errors import invalid, show
from .batch import OfflineBatch, RequestFactory
from .inputs import (
    MediaDefaults,
    is_single_conversation,
    is_single_prompt,
    message_fields,
    prompt_fields,
    prompt_text,
)
from .outputs import RequestOutput, to_request_output
from .params import SamplingParams
from .pooling import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    TokenEmbeddingOutput,
    TokenEmbeddingRequestOutput,
    check_choice,
    embedding_items,
)
from .vllm_arguments import check_call_arguments, to_engine_options

if TYPE_CHECKING:
    from types import TracebackType

    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Self

    from ..response.ocr import OcrPage

T = TypeVar("T")

LOOK_AHEAD = 8
"""Number of requests that are preprocessed while a full batch is being decoded."""

_NO_CLASSES = "because its models generate text, embed or score. Use `embed`, `encode` or `score`."
_NO_SLEEP = "because the weights stay in memory. Use `close` to free it, and create a new VLM."

UNAVAILABLE_METHODS: Mapping[str, str] = {
    **dict.fromkeys(("classify", "reward"), _NO_CLASSES),
    "beam_search": "because completions are not ranked. Use `generate` with `temperature` 0, or with `n`.",
    **dict.fromkeys(("sleep", "wake_up"), _NO_SLEEP),
}
"""Methods of vLLM's `LLM` that do not exist here, with the reason and the next step."""

MEDIA_ROOT = Path("/")
"""The default of `allowed_local_media_path`: the caller can read files in any case."""

SamplingParamsArg = SamplingParams | Sequence[SamplingParams] | None
LoRARequestArg = LoRARequest | Sequence[LoRARequest | None] | None


class VLM:
    """A model in this process, loaded by the constructor.

        with VLM("demo") as vlm:
            (output,) = vlm.generate({"prompt": prompt, "multi_modal_data": {"image": image}})
            print(output.outputs[0].text)

    It can be used from several threads, and while an event loop is running, as in a notebook.

    Args:
        model: as `EngineConfig.model`, which also defines the default.
        engine: an engine to use instead. It is started if necessary, and `close` does not close it.
        seed: makes the completions of requests without `SamplingParams.seed` reproducible: each one gets its own seed.
        mm_processor_kwargs: default options for all images and videos, such as `max_pixels`.
        media_io_kwargs: default options for reading them.
        options: other options of EngineConfig, or arguments of vLLM's `LLM`, which `vllm_arguments` maps to these. By
            default, all local files can be read; `allowed_local_media_path` restricts them to a folder, or with None
            disallows them.

    Attributes:
        engine: the engine that serves the requests.

    Raises:
        SetupError: the configuration or the checkpoint is invalid, a plugin is broken, or an extra is missing.
        InvalidParameter: `mm_processor_kwargs` or `media_io_kwargs` are invalid.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        engine: Engine | None = None,
        seed: int | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        media_io_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if model is not None:
            options["model"] = str(model)
        if engine is not None and options:
            raise ConfigError("`engine` cannot be combined with `model` or other options. Pass these to Engine.")
        self._media_defaults = MediaDefaults(mm_processor_kwargs or {}, media_io_kwargs or {})
        self._seeds = None if seed is None else random.Random(seed)  # noqa: S311  not for cryptography
        self._owned = engine is None
        self.engine: Engine = (engine or Engine(_engine_config(options))).start()
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParamsArg = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequestArg = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete one or many rendered prompts.

        A prompt is text in which special tokens are recognized, a list of token IDs, or an object with `prompt` or
        `prompt_token_ids`, and

        * `multi_modal_data`: `image` and `video`, each one item or a list. An item is an object that
          `media.python_objects` describes, such as the results of qwen-vl-utils' `process_vision_info`, a URL, or a
          path. A list of images under `video` is the frames of one video. To set options of an item, write it as in
          qwen-vl-utils: `{"video": "film.mp4", "fps": 1, "max_pixels": 200704}`.
        * `multi_modal_uuids`: a name or None for each item, under the same keys. Items that were sent before under
          their name can be None; if all of them were, `multi_modal_data` can be omitted.
        * `mm_processor_kwargs`: options for all items, such as `max_pixels`, or what `process_vision_info` returns with
          `return_video_kwargs`.

        The text contains one placeholder for each item, of the item's kind, in order.

        Args:
            prompts: one prompt, or an iterable of prompts. The iterable is consumed only as slots become free, so that
                the images of a generator are never all in memory at once.
            sampling_params: one for all prompts, or a list with one for each; `SamplingParams()` if None.
            use_tqdm: whether to show a progress bar, or a class to use in place of `tqdm`.
            lora_request: the LoRA adapter for all prompts, or a list with one or None for each; None is the model
                itself. An adapter is loaded on first use, see `EngineConfig.max_loras`.
            others: arguments of vLLM's `generate` that change nothing, such as `priority=0`.

        Returns:
            The output of each prompt, in order. A prompt that fails has an `error` and no `outputs`; the others are not
            affected.

        Raises:
            DashInferVLMError: `prompts` is a single prompt, not in a list, and it failed.
            InvalidParameter: the numbers of `sampling_params` or `lora_request` and prompts differ.
            UnsupportedParameter, TypeError: one of `others` is not available, or unknown.
        """
        check_call_arguments(others)

        def make(prompt: object, sampling: SamplingParams, lora: LoRARequest | None) -> OfflineRequest:
            fields = {**prompt_fields(prompt, self._media_defaults), "lora_request": lora}
            return OfflineRequest.parse({**sampling.fields(), **fields})

        single = is_single_prompt(prompts)
        items = [prompts] if single else prompts
        return self._generate(items, make, sampling_params, lora_request, single=single, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParamsArg = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequestArg = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        coordinates: Literal["model", "original"] = "model",
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete one or many conversations in OpenAI's format.

        In addition to the server's content parts (`text`, `image_url`, `video_url`, `image_embeds`), these accept the
        objects that `media.python_objects` describes:

            {"type": "image_pil", "image_pil": image}     {"type": "image", "image": image, URL or path}
            {"type": "image_embeds", "image_embeds": {"image_embeds": tensor, "image_grid_thw": tensor}}
            {"type": "video", "video": frames, URL or path}

        Each can have a `uuid` and options such as `max_pixels` or `fps` next to its value. The value can be None if it
        was sent before under its `uuid`.

        Args:
            messages: a list of messages, or an iterable of such lists, which is consumed as in `generate`.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            tools: tools in OpenAI's format that the model may call. A call is part of the text, as the model writes it,
                and follows the tool's schema. Use `Engine.chat` to get calls as objects.
            mm_processor_kwargs: options for all images and videos, such as `max_pixels`.
            lora_request: as in `generate`.
            chat_template_kwargs: variables of the chat template, such as `enable_thinking`.
            coordinates: with `original`, boxes and points in the messages and the text are in pixels of the original
                image.
            others: arguments of vLLM's `chat` that change nothing, such as `add_generation_prompt=True`.

        Returns:
            The output of each conversation, as in `generate`.

        Raises:
            DashInferVLMError: `messages` is a single conversation, and it failed.
            InvalidParameter: `messages` is text or a single message, or the numbers of `sampling_params` or
                `lora_request` and conversations differ.
            UnsupportedParameter, TypeError: one of `others` is not available, or unknown.
        """
        check_call_arguments(others)

        def make(conversation: object, sampling: SamplingParams, lora: LoRARequest | None) -> OfflineRequest:
            fields = {
                **message_fields(conversation),
                "lora_request": lora,
                "chat_template_kwargs": dict(chat_template_kwargs or {}),
                "tools": tools,
                "coordinates": coordinates,
                **self._media_defaults.fields(mm_processor_kwargs),
            }
            return OfflineRequest.parse({**sampling.fields(), **fields})

        if isinstance(messages, (str, Mapping)):
            raise invalid(
                "messages",
                'must be a list of messages, such as [{"role": "user", "content": "Hello"}], or a list of such lists,'
                f" got {show(messages)}.",
            )
        single = is_single_conversation(messages)
        items = [messages] if single else messages
        return self._generate(items, make, sampling_params, lora_request, single=single, use_tqdm=use_tqdm)

    def ocr(self, document: str | Path, *, pages: Sequence[int] | str | None = None, **options: Any) -> list[OcrPage]:
        """Convert a PDF or an image to Markdown, with the prompt that the model was trained with, if it is known.

        Args:
            document: its path or URL.
            pages: the pages, counted from 0, such as `[0, 2]` or `"0-4"`; all if None.
            options: `dpi`, `max_pixels` and `password` of a PDF.

        Returns:
            The pages, in order. One that fails has an `error` in place of its text.

        Raises:
            DashInferVLMError: the document cannot be read, or all pages failed.
        """
        request = {"document": {"document_url": str(document), **options}, "pages": pages}
        return [chunk.page for chunk in self.engine.ocr(request)]

    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | None = None,
        instruction: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Compute the embeddings of one or many prompts.

        Args:
            prompts: a prompt or a conversation, or a list of them. Prompts are rendered, as in `generate`: the model's
                template is not applied to text. A conversation is a list of messages, as in `chat`.
            use_tqdm: as in `generate`.
            lora_request: the LoRA adapter; None is the model itself.
            instruction: the system message of conversations without one; the model's default if None.
            dimensions: the number of dimensions, if the model was trained for it; all if None.
            truncate_prompt_tokens: the most tokens of a prompt, whose text is cut; -1 for the model's limit, None to
                reject longer prompts.

        Raises:
            DashInferVLMError: a prompt is invalid, and `param` names it, or it could not be computed.
            UnsupportedParameter: the model has another task.
        """
        spec = self.engine.model_spec()
        pooling = pooling_of(spec, "embed", name=self.engine.config.name)
        single = is_single_prompt(prompts) or is_single_conversation(prompts)
        items = embedding_items(
            [prompts] if single else prompts,
            self._media_defaults,
            instruction=instruction or pooling.instruction,
            truncate_prompt_tokens=truncate_prompt_tokens,
            lora_request=lora_request,
        )
        with self._bar(len(items), use_tqdm) as bar:
            result = self.engine.pool(items, dimensions=dimensions, on_done=bar.update)
        return [
            EmbeddingRequestOutput(
                request_id=str(next(self._ids)), num_prompt_tokens=tokens, outputs=EmbeddingOutput(embedding=embedding)
            )
            for embedding, tokens in zip(result.values.tolist(), result.prompt_tokens, strict=True)
        ]

    def encode(
        self,
        prompts: Any,
        *,
        pooling_task: Literal["token_embed"] = "token_embed",
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | None = None,
        input_type: Literal["query", "document"] = "document",
        truncate_prompt_tokens: int | None = None,
    ) -> list[TokenEmbeddingRequestOutput]:
        """Compute the embeddings of all tokens of one or many prompts, with late interaction.

        Args:
            prompts: as in `embed`. A conversation is one message of the user, which is a query or a document.
            pooling_task: the only task.
            use_tqdm: as in `generate`.
            lora_request: as in `embed`.
            input_type: whether conversations are queries or documents, which have different prompts.
            truncate_prompt_tokens: as in `embed`.

        Raises the same errors as `embed`.
        """
        pooling_of(self.engine.model_spec(), "token_embed", name=self.engine.config.name)
        check_choice("pooling_task", pooling_task, ["token_embed"])
        check_choice("input_type", input_type, ["query", "document"])
        single = is_single_prompt(prompts) or is_single_conversation(prompts)
        items = embedding_items(
            [prompts] if single else prompts,
            self._media_defaults,
            template_options={IS_QUERY: input_type == "query"},
            truncate_prompt_tokens=truncate_prompt_tokens,
            lora_request=lora_request,
        )
        with self._bar(len(items), use_tqdm) as bar:
            result = self.engine.pool_tokens(items, on_done=bar.update)
        return [
            TokenEmbeddingRequestOutput(
                request_id=str(next(self._ids)), num_prompt_tokens=tokens, outputs=TokenEmbeddingOutput(data=rows)
            )
            for rows, tokens in zip(result.vectors, result.prompt_tokens, strict=True)
        ]

    def score(
        self,
        queries: Any,
        documents: Any,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Compute how relevant documents are: a probability or, with late interaction, a sum of similarities.

        Args:
            queries: a query, or as many as documents.
            documents: a document, or a list of them. Like a query, it is text, or an object with `text`, `image` and
                `video` (URLs, also `file:`, or base64), or with content parts in `content`.
            use_tqdm: as in `generate`.
            lora_request: the LoRA adapter; None is the model itself.
            instruction: what a relevant document is; the model's default if None.
            truncate_prompt_tokens: as in `embed`, for the query and a document together.

        Returns:
            The output of each pair, in the order of the documents.

        Raises the same errors as `embed`.
        """
        request = ScoreRequest.parse({
            "queries": queries,
            "documents": documents,
            "instruction": instruction,
            "truncate_prompt_tokens": truncate_prompt_tokens,
            **self._media_defaults.fields(None),
        })  # fmt: skip
        with self._bar(len(request.pairs), use_tqdm) as bar:
            result = self.engine.score_pairs(request, lora_request=lora_request, on_done=bar.update)
        return [
            ScoringRequestOutput(
                request_id=str(next(self._ids)), num_prompt_tokens=tokens, outputs=ScoringOutput(score=score)
            )
            for score, tokens in zip(result.values.tolist(), result.prompt_tokens, strict=True)
        ]

    def get_default_sampling_params(self) -> SamplingParams:
        """Return `SamplingParams()`: checkpoints do not change the defaults."""
        return SamplingParams()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the checkpoint's tokenizer as transformers loads it, for example for `apply_chat_template`.

        Raises:
            EngineClosed: the engine is closed.
        """
        from transformers import AutoTokenizer

        folder = self.engine.model_spec().folder
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
        return tokenizer

    if not TYPE_CHECKING:  # otherwise, type checkers would accept any attribute

        def __getattr__(self, name: str) -> object:
            if reason := UNAVAILABLE_METHODS.get(name):
                raise AttributeError(f"VLM has no `{name}`, {reason}", name=name, obj=self)
            raise AttributeError(f"VLM has no attribute {name!r}.", name=name, obj=self)

    def close(self) -> None:
        """Free the model. Running requests fail with EngineClosed. Closing twice is allowed.

        Raises the same errors as `Engine.close`.
        """
        if self._owned:
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self,
        items: Iterable[object],
        make: Callable[[object, SamplingParams, LoRARequest | None], OfflineRequest],
        sampling: SamplingParamsArg,
        lora_request: LoRARequestArg,
        *,
        single: bool,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        started: list[tuple[str | None, LoRARequest | None]] = []

        def factories() -> Iterator[RequestFactory]:
            loras = _per_item("lora_request", lora_request, None, items, kinds=(LoRARequest, type(None)))
            all_params = _per_item("sampling_params", sampling, SamplingParams(), items, kinds=(SamplingParams,))
            for item, params, lora in zip(items, all_params, loras, strict=False):
                started.append((prompt_text(item), lora))
                yield functools.partial(make, item, self._with_seed(params), lora)

        config = self.engine.config
        limit = config.max_batch_size + min(LOOK_AHEAD, config.max_waiting)
        total = len(items) if isinstance(items, Sized) else None
        with self._bar(total, use_tqdm) as bar:
            results = OfflineBatch(self.engine, limit=limit, on_done=bar.update).run(factories())
        if single and isinstance(results[0], DashInferVLMError):
            raise results[0]
        return [
            to_request_output(str(next(self._ids)), *given, result)
            for given, result in zip(started, results, strict=True)
        ]

    def _bar(self, total: int | None, use_tqdm: bool | Callable[..., Any]) -> Any:
        from tqdm.auto import tqdm

        new_bar = use_tqdm if callable(use_tqdm) else tqdm
        return new_bar(total=total, desc="Prompts", unit="prompt", dynamic_ncols=True, disable=not use_tqdm)

    def _with_seed(self, params: SamplingParams) -> SamplingParams:
        if self._seeds is None or params.seed is not None:
            return params
        return replace(params, seed=self._seeds.getrandbits(63))


def _engine_config(arguments: Mapping[str, Any]) -> EngineConfig:
    options = to_engine_options(arguments)
    if variable("allowed_local_media_path") not in variables_set():
        options.setdefault("allowed_local_media_path", MEDIA_ROOT)
    return EngineConfig(**options)


def _per_item(
    name: str, given: T | Sequence[T] | None, default: T, items: Iterable[object], *, kinds: tuple[type, ...]
) -> Iterable[T]:
    if given is None or isinstance(given, kinds):
        return itertools.repeat(default if given is None else cast("T", given))
    if not isinstance(given, Sequence) or not all(isinstance(each, kinds) for each in given):
        raise invalid(name, f"must be {kinds[0].__name__}, or a list of them, got {show(given)}.")
    if not isinstance(items, Sized) or len(items) != len(given):
        raise invalid(name, f"has {len(given)} entries. Pass one for all prompts, or a list of the same length.")
    return given
