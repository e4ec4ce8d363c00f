"""Messages and media -> Prompt: chat template, placeholders, positions, context check. No torch."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from ..config import EngineConfig
from ..errors import ContextLengthExceeded, InvalidParameter
from ..models.interface import Placeholder, PlaceholderSpan, PromptLayout, Visual
from ..models.spec import ModelSpec
from ..protocol import ChatRequest
from ..tokenization.chat_template import ChatTemplate, read_chat_template, unusable
from ..tokenization.hermes import as_text, with_objects
from ..tokenization.tokenizer import CheckpointTokenizer, read_tokenizer

# Characters that Unicode leaves to private agreement; one that no message holds marks what is not to be read as a
# control token.
MARKS = tuple(chr(code) for code in range(0xE000, 0xE100))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """What the decoder reads.

    Attributes:
        token_ids: int64 [length]; each picture or video stands there as a run of placeholders.
        positions: int64 [3, length]: time, height, width.
        spans: of visual tokens, in the order of the prompt.
        image_tokens: placeholders of pictures.
        video_tokens: placeholders of videos.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    spans: tuple[PlaceholderSpan, ...]
    image_tokens: int
    video_tokens: int

    def __len__(self) -> int:
        return len(self.token_ids)


class PromptBuilder:
    """Turns messages into token ids and positions for one checkpoint; may be called from several threads."""

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
        for placeholder in sorted(layout.placeholders, key=lambda one: -len(one.tokens)):
            self._placeholders.setdefault(placeholder.tokens[0], []).append(placeholder)
        self.max_model_len = max_model_len
        self.tokenizer: tokenizers.Tokenizer = tokenizer.backend
        # Control tokens come from the template alone and are looked up by name; everything else is encoded as plain
        # text.
        self.tokenizer.encode_special_tokens = True
        added = self.tokenizer.get_added_tokens_decoder()
        self._control = {token.content: index for index, token in added.items() if token.special}
        self._split = re.compile("|".join(re.escape(name) for name in sorted(self._control, key=len, reverse=True)))
        self._first = sorted({name[0] for name in self._control})
        self._longest = max(len(token) for token in self.tokenizer.get_vocab(with_added_tokens=True))

    @classmethod
    def load(cls, spec: ModelSpec, layout: PromptLayout, config: EngineConfig, *, max_model_len: int) -> PromptBuilder:
        """Read the tokenizer and the chat template of a checkpoint.

        Raises:
            CheckpointError: the folder has no tokenizer, or no chat template.
            ConfigError: the file of `EngineConfig.chat_template` cannot be read, or nothing can be rendered with it.
        """
        tokenizer = read_tokenizer(spec.folder)
        template = read_chat_template(spec.folder, config.chat_template, tokenizer.templates, tokenizer.names)
        builder = cls(tokenizer, template, spec=spec, layout=layout, max_model_len=max_model_len)
        builder.check_template()
        return builder

    def build(self, request: ChatRequest, visuals: Sequence[Visual]) -> Prompt:
        """Render, expand and place one request.

        Args:
            request: its messages hold as many pictures and videos as there are `visuals`.
            visuals: in the order of the messages.

        Raises:
            ContextLengthExceeded: the prompt, or the prompt and the answer asked for, do not fit the context.
            InvalidParameter: the template refuses these messages, or does not place every picture and video.
        """
        try:
            ids, spans = self._expand(self._runs(request), visuals)
        except _Misplaced:
            raise _misplaced(raw=request.raw_prompt is not None) from None
        prompt = Prompt(
            token_ids=np.concatenate(ids),
            positions=self._layout.positions(sum(map(len, ids)), spans, visuals),
            spans=tuple(spans),
            image_tokens=sum(item.tokens for item in visuals if item.kind == "image"),
            video_tokens=sum(item.tokens for item in visuals if item.kind == "video"),
        )
        self._check_length(len(prompt), request)
        return prompt

    def encode(self, text: str) -> list[int]:
        """The token ids of a rendered prompt: control tokens in it count as such.

        Raises:
            ContextLengthExceeded: it is far too long for the model.
        """
        self._check_size(text)
        return [index for run in self._encode(self._pieces(text, mark="")) for index in run]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens included.

        Raises:
            InvalidParameter: an id that the model does not have.
        """
        list(self._checked_ids(tuple(ids), param="tokens"))
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary spells them; empty for ids that the model has and the tokenizer has not."""
        return [self.tokenizer.id_to_token(index) or "" for index in ids]

    def check_template(self) -> None:
        """Render the plainest conversation there is, so that a broken template is the operator's trouble, at start-up.

        Raises:
            ConfigError: the template has an error, or refuses even that.
        """
        try:
            self.render([{"role": "user", "content": "Hello"}])
        except InvalidParameter as error:
            raise unusable(error.__cause__ or error) from error

    def render(self, messages: list[dict[str, Any]], tools: Sequence[Any] = ()) -> str:
        """The chat template's text for `messages` and `tools`, ready for an answer.

        Raises:
            InvalidParameter: the template refuses them.
        """
        if self._template.knows_tools:
            return self._template.render(messages, tools)
        return self._template.render(as_text(messages, tools, self._spec.conversation))

    def _runs(self, request: ChatRequest) -> Iterable[list[int]]:
        """Token ids in order; each control token is a run of its own."""
        prompt = request.raw_prompt
        if prompt is not None and not prompt:
            raise InvalidParameter("The prompt is empty: write something for the model to read.", param="prompt")
        if isinstance(prompt, tuple):
            return self._checked_ids(prompt)
        if prompt is not None:
            self._check_size(prompt)
            return self._encode(self._pieces(prompt, mark=""))
        # Arguments are parsed first: what JSON escapes in them must be guarded as well.
        messages = with_objects(request.template_messages())
        tools = [tool.for_prompt() for tool in request.offered_tools]
        self._check_size([messages, tools])
        mark = _unused_mark([messages, tools])
        guarded = [[_guard(item, self._first, mark) for item in items] for items in (messages, tools)]
        return self._encode(self._pieces(self.render(*guarded), mark))

    def _checked_ids(self, ids: tuple[int, ...], *, param: str = "prompt_token_ids") -> Iterable[list[int]]:
        if not all(0 <= index < self._spec.vocab_size for index in ids):
            raise InvalidParameter(
                f"Token ids of this model are 0 to {self._spec.vocab_size - 1}: encode the prompt with its tokenizer.",
                param=param,
            )
        return ([index] for index in ids)

    def _pieces(self, text: str, mark: str) -> list[str]:
        """The text, cut into control tokens (at odd indices) and plain text (at even ones, mark removed)."""
        pieces, end = [], 0
        for match in self._split.finditer(text):
            pieces += [text[end : match.start()].replace(mark, ""), match.group()]
            end = match.end()
        return [*pieces, text[end:].replace(mark, "")]

    def _encode(self, pieces: list[str]) -> Iterator[list[int]]:
        plain = iter(self.tokenizer.encode_batch_fast(pieces[::2], add_special_tokens=False))
        for index, piece in enumerate(pieces):
            yield [self._control[piece]] if index % 2 else next(plain).ids

    def _expand(
        self, runs: Iterable[list[int]], visuals: Sequence[Visual]
    ) -> tuple[list[npt.NDArray[np.int64]], list[PlaceholderSpan]]:
        """Each placeholder becomes the tokens of the next image or video of its kind."""
        ids: list[npt.NDArray[np.int64]] = []
        spans: list[PlaceholderSpan] = []
        waiting: dict[str, deque[int]] = {"image": deque(), "video": deque()}
        for index, item in enumerate(visuals):
            waiting[item.kind].append(index)
        runs, length, at = [run for run in runs if run], 0, 0
        while at < len(runs):
            placeholder = self._placeholder_at(runs, at)
            if placeholder is None:
                ids.append(np.asarray(runs[at], np.int64))
            else:
                if not waiting[placeholder.kind]:
                    raise _Misplaced
                index = waiting[placeholder.kind].popleft()
                expansion = self._layout.expand(visuals[index], self._encode_plain)
                spans += _placed(expansion.spans, length, index)
                ids.append(expansion.token_ids)
            length += len(ids[-1])
            at += len(placeholder.tokens) if placeholder else 1
        if any(waiting.values()):
            raise _Misplaced
        return ids, spans

    def _placeholder_at(self, runs: Sequence[list[int]], at: int) -> Placeholder | None:
        """What begins at a run, each token of a placeholder being a run of its own."""
        if len(runs[at]) != 1:
            return None
        for placeholder in self._placeholders.get(runs[at][0], ()):
            if [[token] for token in placeholder.tokens] == list(runs[at : at + len(placeholder.tokens)]):
                return placeholder
        return None

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _check_size(self, texts: Any) -> None:
        """Refuse a text that is too long before spending time on it: a token spans only so many characters."""
        least = sum(map(len, _strings(texts))) // self._longest
        if least > self.max_model_len:
            raise ContextLengthExceeded(
                f"The messages have at least {least} tokens, but the model reads {self.max_model_len}, answer included:"
                " shorten them.",
                prompt_tokens=least,
                limit=self.max_model_len,
            )

    def check_media(self, tokens: int) -> None:
        """Refuse so many visual tokens; cheap enough to ask before anything is resized.

        Raises:
            ContextLengthExceeded: they alone do not fit the context.
        """
        if tokens >= self.max_model_len:
            raise ContextLengthExceeded(
                f"The pictures and videos have at least {tokens} tokens, but the model reads {self.max_model_len},"
                " answer included: send fewer, or lower max_pixels.",
                prompt_tokens=tokens,
                limit=self.max_model_len,
            )

    def _check_length(self, prompt_tokens: int, request: ChatRequest) -> None:
        if prompt_tokens >= self.max_model_len:
            raise ContextLengthExceeded(
                f"The prompt has {prompt_tokens} tokens, pictures and videos included, but the model reads"
                f" {self.max_model_len}, answer included: shorten the messages, or lower max_pixels.",
                prompt_tokens=prompt_tokens,
                limit=self.max_model_len,
            )
        max_tokens = request.sampling().max_tokens
        if max_tokens is not None and prompt_tokens + max_tokens > self.max_model_len:
            raise ContextLengthExceeded(
                f"The prompt has {prompt_tokens} tokens and {max_tokens} more are asked for, but the model reads"
                f" {self.max_model_len} in all: ask for at most {self.max_model_len - prompt_tokens}.",
                prompt_tokens=prompt_tokens,
                limit=self.max_model_len,
                param="max_completion_tokens" if request.max_completion_tokens else "max_tokens",
            )


def _placed(runs: Iterable[tuple[int, int]], start: int, item: int) -> Iterator[PlaceholderSpan]:
    """The runs of an item's expansion, which begins at token `start` of the prompt, as spans of the prompt."""
    row = 0
    for index, length in runs:
        yield PlaceholderSpan(start=start + index, length=length, item=item, row=row)
        row += length


def _guard(value: Any, first: Sequence[str], mark: str) -> Any:
    """A copy of `value` whose strings cannot be read as control tokens, nor become ones beside their neighbours."""
    if isinstance(value, str):
        for letter in first:
            value = value.replace(letter, letter + mark)
        return value
    if isinstance(value, Mapping):
        return {_guard(key, first, mark): _guard(item, first, mark) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_guard(item, first, mark) for item in value]
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _unused_mark(texts: Any) -> str:
    text = "".join(_strings(texts))
    for mark in MARKS:
        if mark not in text:
            return mark
    raise InvalidParameter(
        "The messages use every private-use character from U+E000 to U+E0FF: leave one out.", param="messages"
    )


class _Misplaced(Exception):
    """Placeholders and media do not go together."""


def _misplaced(*, raw: bool) -> InvalidParameter:
    if raw:
        return InvalidParameter(
            "The prompt must hold one placeholder for each picture and video, of its kind.",
            param="prompt",
        )
    return InvalidParameter(
        "The chat template does not place every picture and video of these messages: put them into user"
        " messages, or check --chat-template.",
        param="messages",
    )
