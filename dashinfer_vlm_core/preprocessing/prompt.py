"""Messages and media -> Prompt: chat template, placeholders, positions, context check. No torch.

It is one file because the steps share the tokenizer's special tokens and the context length.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers

from ..config import EngineConfig
from ..errors import ContextLengthExceeded, InvalidParameter
from ..media.types import TokenCount, VisualInput
from ..models.coordinates import ImageCoordinates
from ..models.interface import Placeholder, PlaceholderSpan, PromptLayout
from ..models.spec import ModelSpec
from ..protocol import ChatRequest
from ..tokenization.chat_template import ChatTemplate, read_chat_template, template_config_error
from ..tokenization.conversation import ConversationFormat
from ..tokenization.hermes import parse_tool_arguments, render_tools_as_text
from ..tokenization.tokenizer import CheckpointTokenizer, TokenizerCache
from .coordinates import with_model_coordinates
from .guarded_text import TextGuard, map_strings, strings_in, unused_mark
from .pruning import PlacedTokens, drop_pruned
from .retrieval import retrieval_template
from .template_options import TemplateOptions

MAX_TAG_TOKENS = 16
"""More than the tokens of a tag and the white space after it."""

MAX_ENCODED_CONTEXTS = 4
"""Pruned images and videos may have as many times the context length before pruning. The vision encoder's time and
memory depend on that number, and clients choose the rate."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """A tokenized prompt, the decoder's input.

    Attributes:
        token_ids: int64 [length]; each image or video is a run of placeholder tokens.
        positions: int64 [3, length]: time, height, width.
        spans: spans of visual tokens, in the order of the prompt.
        response_boundaries: see `DecodeRequest`.
        image_tokens: number of image placeholder tokens.
        video_tokens: number of video placeholder tokens.
        pruned_tokens: number of visual tokens that were dropped.
        opens_reasoning: whether it ends with the tag that begins reasoning.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    spans: tuple[PlaceholderSpan, ...]
    response_boundaries: tuple[int, ...]
    image_tokens: int
    video_tokens: int
    pruned_tokens: int = 0
    opens_reasoning: bool = False

    def __len__(self) -> int:
        return len(self.token_ids)


GREETING: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
"""A minimal conversation."""


class _Segment(NamedTuple):
    """A part of a prompt.

    Attributes:
        ids: token ids; those of a special token are a separate segment.
        text: the plain text that they encode; empty for special tokens, and in a prompt of token ids.
    """

    ids: Sequence[int]
    text: str = ""


class PromptBuilder:
    """Converts messages to token ids and positions for one checkpoint; thread-safe."""

    def __init__(
        self,
        tokenizer: CheckpointTokenizer,
        template: ChatTemplate,
        *,
        spec: ModelSpec,
        layout: PromptLayout,
        max_model_len: int,
    ) -> None:
        self._template = template
        self._spec = spec
        self._layout = layout
        self._placeholders: dict[int, list[Placeholder]] = {}
        for placeholder in sorted(layout.placeholders, key=lambda item: -len(item.tokens)):
            self._placeholders.setdefault(placeholder.tokens[0], []).append(placeholder)
        self.max_model_len = max_model_len
        self.tokenizer: tokenizers.Tokenizer = tokenizer.backend
        # Only the template produces special tokens, which are looked up by name; everything else is encoded as plain
        # text.
        self.tokenizer.encode_special_tokens = True
        added = self.tokenizer.get_added_tokens_decoder()
        self._special_tokens = {token.content: index for index, token in added.items() if token.special}
        self._split = re.compile(
            "|".join(re.escape(name) for name in sorted(self._special_tokens, key=len, reverse=True))
        )
        self.conversation: ConversationFormat = template.conversation(spec.conversation)
        reasoning_tags = self.conversation.reasoning_begin, self.conversation.reasoning_end
        self.supports_reasoning: bool = any(map(template.mentions, reasoning_tags))
        """Whether completions may begin with reasoning."""
        self.options: TemplateOptions = TemplateOptions(template, supports_reasoning=self.supports_reasoning)
        self._guard = TextGuard(self._special_tokens, self.conversation.tags)

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        layout: PromptLayout,
        config: EngineConfig,
        *,
        max_model_len: int,
        tokenizers: TokenizerCache | None = None,
    ) -> PromptBuilder:
        """Read the tokenizer and the chat template of a checkpoint; with `tokenizers`, if they have not read it.

        Raises:
            CheckpointError: the folder has no tokenizer or no chat template.
            ConfigError: the file of `EngineConfig.chat_template` cannot be read, or its template cannot be rendered; or
                the model has prompts instead of a template.
        """
        tokenizer = (tokenizers or TokenizerCache()).read(spec.folder)
        if spec.pooling and spec.pooling.format:
            template = retrieval_template(spec.pooling.format, config.chat_template)
        else:
            template = read_chat_template(
                spec.folder, config.chat_template, tokenizer.chat_templates, tokenizer.special_tokens_map
            )
        builder = cls(tokenizer, template, spec=spec, layout=layout, max_model_len=max_model_len)
        builder.check_template()
        return builder

    def build(
        self, request: ChatRequest, visuals: Sequence[VisualInput], coordinates: ImageCoordinates | None = None
    ) -> Prompt:
        """Render and tokenize one request, expand its placeholders and compute positions.

        Args:
            request: a request with as many images and videos as `visuals`.
            visuals: the images and videos, in the order of the messages.
            coordinates: converts coordinates in messages; None if they are the model's.

        Raises:
            ContextLengthExceeded: the prompt, or the prompt plus the requested completion, exceeds the context.
            InvalidParameter: the template rejects the messages, or does not include every image and video.
        """
        is_raw = request.raw_prompt is not None
        ids, spans = self._expand(self._segments(request, coordinates), visuals, is_raw=is_raw)
        if not isinstance(request.raw_prompt, tuple):
            ids.append(self._suffix)
        whole = np.concatenate(ids)
        positions = self._layout.positions(len(whole), spans, visuals)
        token_ids, positions, spans = drop_pruned(PlacedTokens(whole, positions, spans), visuals)
        if request.prompt_limit is not None:
            token_ids = self._cut(token_ids, spans, request)
        prompt = Prompt(
            token_ids=token_ids,
            positions=positions[:, : len(token_ids)],  # only text after all spans is cut
            spans=tuple(spans),
            response_boundaries=self._response_boundaries(token_ids),
            image_tokens=sum(item.kept_tokens for item in visuals if item.kind == "image"),
            video_tokens=sum(item.kept_tokens for item in visuals if item.kind == "video"),
            pruned_tokens=sum(item.pruned_tokens for item in visuals),
            opens_reasoning=self.supports_reasoning and self._ends_with_tag(token_ids[-MAX_TAG_TOKENS:].tolist()),
        )
        self._check_length(len(prompt), request)
        return prompt

    @functools.cached_property
    def _suffix(self) -> npt.NDArray[np.int64]:
        """The tokens that the tokenizer of a pooling model appends, such as the one whose hidden state is pooled."""
        if self._spec.pooling is None:
            return np.zeros(0, np.int64)
        plain = self.encode_plain("a")
        ids = self.tokenizer.encode("a", add_special_tokens=True).ids
        return np.asarray(ids[len(plain) :] if ids[: len(plain)] == plain else (), np.int64)

    def _template_end(self, request: ChatRequest, *, has_media: bool) -> int:
        """Return the number of tokens that the template writes after the last message of the user."""
        text = "\x00"
        parts = [{"type": "image"}, {"type": "text", "text": text}]
        messages = [{"role": "user", "content": parts if has_media else text}]
        rendered = self.render(messages, (), self.options.of(request))
        return sum(len(segment.ids) for segment in self._encode(self._pieces(rendered.rpartition(text)[2], mark="")))

    def _cut(
        self, token_ids: npt.NDArray[np.int64], spans: Sequence[PlaceholderSpan], request: ChatRequest
    ) -> npt.NDArray[np.int64]:
        """Cut the end of the last text before what the template writes after it, as the published code does."""
        assert request.prompt_limit is not None
        limit = min(request.prompt_limit, self.max_model_len) if request.prompt_limit > 0 else self.max_model_len
        if len(token_ids) <= limit:
            return token_ids
        raw = request.raw_prompt
        end = 0 if isinstance(raw, tuple) else len(self._suffix)
        if raw is None:
            end += self._template_end(request, has_media=bool(spans))
        kept = limit - end
        if kept <= max((span.start + span.length for span in spans), default=0):
            raise self._too_long(
                f"`truncate_prompt_tokens` is {limit}, which leaves no text: only text is cut, not images and videos."
                " Increase it, or lower `max_pixels`.",
                len(token_ids),
            )
        return np.concatenate((token_ids[:kept], token_ids[len(token_ids) - end :]))

    def encode(self, text: str) -> list[int]:
        """Encode a rendered prompt to token ids; special tokens in it are parsed.

        Raises:
            ContextLengthExceeded: the text is certainly too long for the model.
        """
        self._check_size(text)
        return [index for segment in self._encode(self._pieces(text, mark="")) for index in segment.ids]

    def count_tokens(self, request: ChatRequest) -> int:
        """Count the tokens of a request, before images and videos replace their placeholders.

        Raises:
            ContextLengthExceeded: the text is certainly too long for the model.
            InvalidParameter: the template rejects the messages.
        """
        return sum(len(segment.ids) for segment in self._segments(request, None))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids to text, including special tokens.

        Raises:
            InvalidParameter: an id is outside the model's vocabulary.
        """
        list(self._checked_ids(tuple(ids), param="tokens"))
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's tokens; empty for ids that the model has but the tokenizer does not."""
        return [self.tokenizer.id_to_token(index) or "" for index in ids]

    def opens_reasoning(self, request: ChatRequest) -> bool:
        """Return whether the prompt of a request will end with the tag that begins reasoning, without its media."""
        if not self.supports_reasoning or request.raw_prompt is not None:
            return False
        tools = [tool.for_template() for tool in request.offered_tools]
        text = self.render(GREETING, tools, self.options.of(request))
        return text.rstrip().endswith(self.conversation.reasoning_begin)

    @functools.cached_property
    def _response_frame(self) -> tuple[list[int], list[int]]:
        """The header of messages of the assistant, which is the first line of the generation prompt, since its other
        lines depend on whether the model reasons; and what ends messages. Empty unless the first token is special."""
        try:
            whole = self._template.render(GREETING)
            history = self._template.render(GREETING, add_generation_prompt=False)
        except InvalidParameter:  # `check_template` reports it
            return [], []
        header = "".join(whole.removeprefix(history).partition("\n")[:2])
        end = history.rpartition(GREETING[0]["content"])[2]
        return self._encode_marker(header), self._encode_marker(end)

    def _encode_marker(self, text: str) -> list[int]:
        return self.encode(text) if self._split.match(text) else []

    def _response_boundaries(self, token_ids: npt.NDArray[np.int64]) -> tuple[int, ...]:
        header, end = self._response_frame
        starts, ends = _ends_of(header, token_ids), _ends_of(end, token_ids)
        following = np.searchsorted(ends, starts, side="right")
        return tuple(np.union1d(starts, ends[following[following < len(ends)]]).tolist())

    def _ends_with_tag(self, token_ids: list[int]) -> bool:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text.rstrip().endswith(self.conversation.reasoning_begin)

    def check_template(self) -> None:
        """Render a minimal conversation, so that a broken template is reported at startup instead of by requests.

        Raises:
            ConfigError: the template raised an error.
        """
        try:
            self.render(GREETING)
        except InvalidParameter as error:
            raise template_config_error(error.__cause__ or error) from error

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Any] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render `messages` and `tools` with the chat template, including the generation prompt.

        Args:
            messages: the messages, as `ChatRequest.template_messages` returns them.
            tools: the available tools.
            options: other variables of the template.

        Raises:
            InvalidParameter: the template rejects them.
        """
        if self._template.supports_tools:
            return self._template.render(messages, tools, options)
        return self._template.render(render_tools_as_text(messages, tools, self.conversation), (), options)

    def _segments(self, request: ChatRequest, coordinates: ImageCoordinates | None) -> Iterable[_Segment]:
        prompt = request.raw_prompt
        if prompt is not None and not prompt:
            raise InvalidParameter("The prompt is empty; it needs at least one token.", param="prompt")
        if isinstance(prompt, tuple):
            return self._checked_ids(prompt)
        if prompt is not None:
            prompt = self._checked(prompt, request)
            return self._encode(self._pieces(prompt, mark=""))
        messages = request.template_messages()
        tools = [tool.for_template() for tool in request.offered_tools]
        options = self.options.of(request)
        messages, tools, options = self._checked([messages, tools, options], request)  # before texts are searched
        if coordinates:
            messages = with_model_coordinates(messages, coordinates)
        # Arguments are parsed first, because JSON-escaped text in them must be guarded as well.
        given = [parse_tool_arguments(messages, self.conversation), tools, options]
        mark = unused_mark(given)
        pieces = self._pieces(self.render(*(self._guard.copy(value, mark) for value in given)), mark)
        # Arguments of many short values are rendered as more text than their strings.
        return self._encode(self._checked(pieces, request))

    def _checked_ids(self, ids: tuple[int, ...], *, param: str = "prompt_token_ids") -> Iterable[_Segment]:
        if not all(0 <= index < self._spec.vocab_size for index in ids):
            raise InvalidParameter(
                f"Token ids must be 0 to {self._spec.vocab_size - 1} for this model. Encode the prompt with its"
                " tokenizer.",
                param=param,
            )
        return (_Segment([index]) for index in ids)

    def _pieces(self, text: str, mark: str) -> list[str]:
        """Split text into special tokens (odd indices) and plain text (even indices, mark removed)."""
        pieces = []
        end = 0
        for match in self._split.finditer(text):
            pieces += [text[end : match.start()].replace(mark, ""), match.group()]
            end = match.end()
        return [*pieces, text[end:].replace(mark, "")]

    def _encode(self, pieces: list[str]) -> Iterator[_Segment]:
        plain = iter(self.tokenizer.encode_batch_fast(pieces[::2], add_special_tokens=False))
        for index, piece in enumerate(pieces):
            yield _Segment([self._special_tokens[piece]]) if index % 2 else _Segment(next(plain).ids, piece)

    def _expand(
        self, segments: Iterable[_Segment], visuals: Sequence[VisualInput], *, is_raw: bool
    ) -> tuple[list[npt.NDArray[np.int64]], list[PlaceholderSpan]]:
        ids: list[npt.NDArray[np.int64]] = []
        spans: list[PlaceholderSpan] = []
        waiting: dict[str, deque[int]] = {"image": deque(), "video": deque()}
        for index, item in enumerate(visuals):
            waiting[item.kind].append(index)
        segments = [segment for segment in segments if segment.ids]
        length = 0
        position = 0
        while position < len(segments):
            placeholder = self._placeholder_at(segments, position)
            if placeholder is None:
                ids.append(np.asarray(segments[position].ids, np.int64))
            else:
                if not waiting[placeholder.kind]:
                    raise _placeholder_error(is_raw=is_raw)
                index = waiting[placeholder.kind].popleft()
                expansion = self._layout.expand(visuals[index], self.encode_plain)
                if expansion.leading_text:
                    before = segments[position - 1].text if position else ""
                    replaced = ids.pop() if before else ()
                    ids.append(np.asarray(self.encode_plain(before + expansion.leading_text), np.int64))
                    length += len(ids[-1]) - len(replaced)
                spans += _to_prompt_spans(expansion.spans, length, index)
                ids.append(expansion.token_ids)
            length += len(ids[-1])
            position += len(placeholder.tokens) if placeholder else 1
        if any(waiting.values()):
            raise _placeholder_error(is_raw=is_raw)
        return ids, spans

    def _placeholder_at(self, segments: Sequence[_Segment], position: int) -> Placeholder | None:
        if len(segments[position].ids) != 1:
            return None
        for placeholder in self._placeholders.get(segments[position].ids[0], ()):
            candidate = segments[position : position + len(placeholder.tokens)]
            if [[token] for token in placeholder.tokens] == [segment.ids for segment in candidate]:
                return placeholder
        return None

    def encode_plain(self, text: str) -> list[int]:
        """Encode text without special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @functools.cached_property
    def _max_token_chars(self) -> int:
        return max(map(len, self.tokenizer.get_vocab(with_added_tokens=True)))

    def _checked(self, texts: Any, request: ChatRequest) -> Any:
        """Check the size of texts or, if the prompt is cut, leave out what is certainly cut, before tokenizing it."""
        if request.prompt_limit is None:
            self._check_size(texts)
            return texts
        return map_strings(texts, lambda text: text[: self.max_model_len * self._max_token_chars])

    def _check_size(self, texts: Any) -> None:
        # A lower bound, before the text is tokenized.
        chars = sum(map(len, strings_in(texts)))
        min_tokens = chars // self._max_token_chars if chars > self.max_model_len else 0
        if min_tokens > self.max_model_len:
            raise self._too_long(
                f"The messages have at least {min_tokens} tokens, but the context length is {self.max_model_len},"
                " completion included. Shorten them.",
                min_tokens,
            )

    @property
    def max_media_tokens(self) -> TokenCount:
        """The most visual tokens that `check_media` accepts."""
        return TokenCount(self.max_model_len - 1, MAX_ENCODED_CONTEXTS * self.max_model_len)

    def check_media(self, tokens: TokenCount) -> None:
        """Check numbers of visual tokens; cheap enough to call before anything is resized.

        Raises:
            ContextLengthExceeded: the visual tokens alone exceed the context, or those before pruning four contexts.
        """
        limit = self.max_media_tokens
        if tokens.kept > limit.kept:
            raise self._too_long(
                f"The images and videos have at least {tokens.kept} tokens, but the context length is"
                f" {self.max_model_len}, completion included. Send fewer, or lower `max_pixels`.",
                tokens.kept,
            )
        if tokens.encoded > limit.encoded:
            raise self._too_long(
                f"The images and videos have {tokens.encoded} tokens before pruning, but at most {limit.encoded} are"
                f" allowed, {MAX_ENCODED_CONTEXTS} times the context length. Send fewer, or lower `max_pixels`.",
                tokens.encoded,
            )

    def _check_length(self, prompt_tokens: int, request: ChatRequest) -> None:
        if prompt_tokens >= self.max_model_len + (self._spec.pooling is not None):  # no token follows a pooled one
            advice = ", completion included. Shorten the messages, or lower `max_pixels`."
            if self._spec.pooling:
                advice = ". Shorten the text, set `truncate_prompt_tokens` to cut it, or lower `max_pixels`."
            raise self._too_long(
                f"The prompt has {prompt_tokens} tokens, images and videos included, but the context length is"
                f" {self.max_model_len}{advice}",
                prompt_tokens,
            )
        max_tokens = request.sampling().max_tokens
        if max_tokens is not None and prompt_tokens + max_tokens > self.max_model_len:
            raise ContextLengthExceeded(
                f"The prompt has {prompt_tokens} tokens and {max_tokens} more are requested, but the context length is"
                f" {self.max_model_len}. Request at most {self.max_model_len - prompt_tokens}.",
                prompt_tokens=prompt_tokens,
                limit=self.max_model_len,
                param="max_completion_tokens" if request.max_completion_tokens else "max_tokens",
            )

    def _too_long(self, message: str, tokens: int) -> ContextLengthExceeded:
        return ContextLengthExceeded(message, prompt_tokens=tokens, limit=self.max_model_len)


def _ends_of(marker: Sequence[int], token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the indices after each occurrence of a marker; none of an empty one."""
    if not 0 < len(marker) <= len(token_ids):
        return np.empty(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(token_ids, len(marker))
    return np.flatnonzero((windows == marker).all(axis=1)) + len(marker)


def _to_prompt_spans(spans: Iterable[tuple[int, int]], start: int, item: int) -> Iterator[PlaceholderSpan]:
    row = 0
    for index, length in spans:
        yield PlaceholderSpan(start=start + index, length=length, item=item, row=row)
        row += length


def _placeholder_error(*, is_raw: bool) -> InvalidParameter:
    if is_raw:
        return InvalidParameter(
            "The prompt must contain one placeholder of the matching kind for each image and video. Render it with"
            " `apply_chat_template` of the model's tokenizer, which inserts them.",
            param="prompt",
        )
    return InvalidParameter(
        "The chat template does not include every image and video of these messages. Put them into user messages, or"
        " check --chat-template.",
        param="messages",
    )
