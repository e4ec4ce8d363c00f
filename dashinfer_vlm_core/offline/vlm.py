"""VLM: the way in for scripts and notebooks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig
from ..engine import Engine
from ..errors import ConfigError, DashInferVLMError, InvalidParameter
from ..protocol import OfflineRequest
from .batch import Make, OfflineBatch, Outcome
from .inputs import from_messages, from_prompt, is_one_conversation, is_one_prompt, text_of
from .outputs import RequestOutput, to_request_output
from .params import SamplingParams

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

LOOK_AHEAD = 8
"""Requests that are prepared while a whole batch is being decoded."""

Sampling = SamplingParams | Sequence[SamplingParams] | None


class VLM:
    """A model in this process, loaded when this is made.

        with VLM("demo") as vlm:
            (output,) = vlm.generate({"prompt": prompt, "multi_modal_data": {"image": picture}})
            print(output.outputs[0].text)

    It may be used from several threads, and where an event loop runs already, as in a notebook.

    Args:
        model: as `EngineConfig.model`, which says what is loaded by default.
        engine: use this one instead, which is started if need be, and which `close` leaves alone.
        options: others of EngineConfig.

    Attributes:
        engine: answers the requests.

    Raises:
        SetupError: the configuration, the checkpoint, a plugin or a missing extra is in the way.
    """

    def __init__(self, model: str | Path | None = None, *, engine: Engine | None = None, **options: Any) -> None:
        if model is not None:
            options["model"] = str(model)
        if engine is not None and options:
            raise ConfigError("An engine that is there already has its options: give it to VLM without others.")
        self._owned = engine is None
        self.engine: Engine = (engine or Engine(EngineConfig(**options))).start()
        self._ids = itertools.count()

    def generate(self, prompts: Any, sampling_params: Sampling = None, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Answer one prompt that is rendered already, or many.

        A prompt is text whose control tokens count as such, a list of token ids, or an object of `prompt` or
        `prompt_token_ids` and

        * `multi_modal_data`: under `image` and `video`, one or a list of what `media.memory` describes, of URLs, or of
          paths under `allowed_local_media_path`. A list of pictures under `video` is the frames of one. With options of
          its own each is written as in qwen-vl-utils: `{"video": "film.mp4", "fps": 1, "max_pixels": 200704}`.
        * `multi_modal_uuids`: under the same keys a name or None for each; what was sent before under its name may be
          None, or left out where all are.
        * `mm_processor_kwargs`: options for all of them, such as `max_pixels`.

        The text has one placeholder for each, of its kind, in the order given.

        Args:
            prompts: one, or an iterable of them, which is read only as far as there is room: a generator's thousands of
                pictures are never in memory together.
            sampling_params: one for all, or one for each of a list of prompts; `SamplingParams()` if None.
            use_tqdm: whether to show a progress bar.

        Returns:
            What became of each, in order. One that fails has an `error` and no `outputs`; the others are not affected.

        Raises:
            DashInferVLMError: `prompts` is a single one, not in a list, and it failed.
            InvalidParameter: there are not as many `sampling_params` as prompts.
        """
        alone = is_one_prompt(prompts)
        return self._answer([prompts] if alone else prompts, from_prompt, sampling_params, alone, use_tqdm)

    def chat(
        self,
        messages: Any,
        sampling_params: Sampling = None,
        *,
        use_tqdm: bool = True,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation in OpenAI's form, or many.

        Besides the parts that a server takes (`text`, `image_url`, `video_url`, `image_embeds`) there are some for
        objects, as `media.memory` describes them:

            {"type": "image_pil", "image_pil": picture}     {"type": "image", "image": picture, URL or path}
            {"type": "image_embeds", "image_embeds": {"image_embeds": tensor, "image_grid_thw": tensor}}
            {"type": "video", "video": frames, URL or path}

        Each may have a `uuid`, and options such as `max_pixels` or `fps` beside it; what was sent before under its
        `uuid` may be None.

        Args:
            messages: a list of messages, or an iterable of such lists, which is read as in `generate`.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            mm_processor_kwargs: options for all pictures and videos, such as `max_pixels`.

        Returns:
            As `generate`.

        Raises:
            DashInferVLMError: `messages` is a single conversation, and it failed.
            InvalidParameter: there are not as many `sampling_params` as conversations.
        """

        def make(conversation: object, sampling: SamplingParams) -> OfflineRequest:
            return from_messages(conversation, sampling, mm_processor_kwargs)

        alone = is_one_conversation(messages)
        return self._answer([messages] if alone else messages, make, sampling_params, alone, use_tqdm)

    def close(self) -> None:
        """Free the model; what still runs ends with EngineClosed. Closing twice is allowed.

        Raises as `Engine.close`.
        """
        if self._owned:
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(
        self,
        items: Iterable[object],
        make: Callable[[object, SamplingParams], OfflineRequest],
        sampling: Sampling,
        alone: bool,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        from tqdm.auto import tqdm

        texts: list[str | None] = []

        def makers() -> Iterator[Make]:
            for item, params in zip(items, _samplings(sampling, items), strict=False):
                texts.append(text_of(item))
                yield functools.partial(make, item, params)

        total = len(items) if isinstance(items, Sized) else None
        with tqdm(total=total, desc="Prompts", unit="prompt", dynamic_ncols=True, disable=not use_tqdm) as bar:
            outcomes = OfflineBatch(self.engine, limit=self._limit, on_done=bar.update).run(makers())
        if alone and isinstance(outcomes[0], DashInferVLMError):
            raise outcomes[0]
        return [self._output(text, outcome) for text, outcome in zip(texts, outcomes, strict=True)]

    def _output(self, text: str | None, outcome: Outcome) -> RequestOutput:
        number = str(next(self._ids))
        if isinstance(outcome, DashInferVLMError):
            return RequestOutput(request_id=number, prompt=text, error=outcome)
        return to_request_output(number, text, outcome)

    @property
    def _limit(self) -> int:
        """Never more than the engine has places for."""
        config = self.engine.config
        return config.max_batch_size + min(LOOK_AHEAD, config.max_waiting)


def _samplings(sampling: Sampling, items: Iterable[object]) -> Iterable[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return itertools.repeat(sampling or SamplingParams())
    if not isinstance(items, Sized) or len(items) != len(sampling):
        raise InvalidParameter(
            f"There are {len(sampling)} SamplingParams: give one for all, or a list of as many prompts.",
            param="sampling_params",
        )
    return sampling
