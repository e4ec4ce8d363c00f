"""VllmXargs: the arguments of vLLM's logits processors in a request."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from .base import LARGEST, Array, Count, RequestModel
from .validation_errors import invalid

DEFAULT_WINDOW = 100
"""The window of `ngram_size`, as in vLLM."""

MAX_LISTED_TOKENS = 1024

NgramSize = Annotated[int, Field(ge=0, le=LARGEST)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST)]


class VllmXargs(RequestModel):
    """Arguments of vLLM's processors that prevent repetitions: MinerU's has `no_repeat_ngram_size`, DeepSeek-OCR's the
    others. Arguments of other processors have no effect."""

    no_repeat_ngram_size: NgramSize = 0
    ngram_size: NgramSize = 0
    window_size: Count | None = None
    whitelist_token_ids: Annotated[Array[TokenId], Field(max_length=MAX_LISTED_TOKENS)] = ()

    def sampling(self, no_repeat_ngram_size: int) -> dict[str, Any]:
        """Return the fields of `Sampling`, given the request's own `no_repeat_ngram_size`.

        Raises:
            InvalidParameter: the sizes differ.
        """
        sizes = {size for size in (no_repeat_ngram_size, self.no_repeat_ngram_size, self.ngram_size) if size}
        if len(sizes) > 1:
            raise invalid("vllm_xargs", "and `no_repeat_ngram_size` define different sizes. Pass one of them.")
        if not sizes:
            return {}
        return {
            "no_repeat_ngram_size": sizes.pop(),
            "no_repeat_ngram_window": self.window_size or (DEFAULT_WINDOW if self.ngram_size else None),
            "no_repeat_ngram_whitelist": self.whitelist_token_ids,
        }
