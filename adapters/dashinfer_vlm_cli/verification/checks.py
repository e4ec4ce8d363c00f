"""What is compared with transformers; docs/gpu.md explains the bounds."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dashinfer_vlm_core.decoders import Decoder, DecodeRequest, Sampling, Token

from .checkpoint import Checkpoint, Prompt, PromptBuilder, Reference
from .models import SIZES, build_model, write_model
from .report import Check, Results

COMPLETION = 16
LISTED = 20  # log probabilities that the decoder reports for each token
CANCEL_AFTER = 3
LONG_COMPLETION = 100
NUM_LONG = 8  # sequences that begin in a KV cache of 1 MiB, and do not fit into it until the end of a long completion
IDLE_POLLS = 1000  # the decoder frees what canceled requests used at the end of a step
CUDA_PASSES = 4  # of the encoder: the third pass over images of the same sizes is recorded as a graph
FLOAT32_BOUND = 1e-3  # of the largest visual token's value, and of a log probability: another order of summation
BFLOAT16_FACTOR = 2.0  # of the error that transformers itself has in bfloat16
OPTIONS: dict[str, Any] = {"kv_cache_mib": 64, "prefill_chunk": 64}  # a long text takes several chunks
GREEDY = Sampling(temperature=0, max_tokens=COMPLETION, ignore_eos=True)


class Session:
    """A running engine, transformers in float32 (`exact`) and in bfloat16 (`half`), and prompts for them.

    The batch has a short text, one of several chunks, images of different sizes, and a video. All but the first prompt
    are long enough for the prefix cache, which keeps recurrent states at multiples of 64 tokens.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str, exact: Reference, half: Reference, decoder: Decoder) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.exact = exact
        self.half = half
        self.decoder = decoder
        self.encoder = checkpoint.load_encoder(checkpoint.config(dtype, **OPTIONS))
        self._encoded: dict[str, list[Tensor]] = {}
        build = PromptBuilder(checkpoint)
        text = build.text(9)
        image = build.image(288, 320)
        two = (build.text(3), build.image(84, 140), build.text(4), build.image(224, 224), build.text(20))
        self.batch = [
            build.prompt("text", build.text(12)),
            build.prompt("long text", build.text(150)),
            build.prompt("image", image, text),
            build.prompt("two images", *two),
            # Two steps in time: after longer videos, positions differ from those of transformers.
            build.prompt("video", build.text(4), build.video(4, 112, 140), build.text(60)),
        ]
        self.other_text = build.prompt("image, other text", image, build.text(9))
        self.other_image = build.prompt("other image", build.image(288, 320), text)

    def run_other(self, **options: Any) -> contextlib.AbstractAsyncContextManager[Decoder]:
        """Run a decoder with other options."""
        return self.checkpoint.decoding(self.checkpoint.config(self.dtype, **options))

    async def complete(
        self, prompts: Sequence[Prompt], salt: str = "", decoder: Decoder | None = None, **sampling: Any
    ) -> list[list[Token]]:
        """Complete prompts at the same time; only those with the same salt are found in the prefix cache."""
        requests = [self.request(prompt, salt, **sampling) for prompt in prompts]
        return await asyncio.gather(*(read(decoder or self.decoder, request) for request in requests))

    def request(self, prompt: Prompt, salt: str, **sampling: Any) -> DecodeRequest:
        if prompt.name not in self._encoded:
            self._encoded[prompt.name] = self.encoder.encode(prompt.items) if prompt.items else []
        return replace(prompt.request(self._encoded[prompt.name], replace(GREEDY, **sampling)), cache_salt=salt)

    def bound(self, error_of_half: Callable[[], float]) -> tuple[float, str]:
        """Return the largest error that passes, as a number and in words."""
        if self.dtype == "float32":
            return FLOAT32_BOUND, f"at most {FLOAT32_BOUND:g}"
        theirs = error_of_half()
        bound = BFLOAT16_FACTOR * theirs
        return bound, f"at most {bound:.2g} ({BFLOAT16_FACTOR:g} times transformers' {theirs:.2g})"

    @functools.cached_property
    def logprob_bound(self) -> tuple[float, str]:
        """Return the bound of the log probabilities of the most likely tokens."""
        completion = range(COMPLETION)  # any one has such errors

        def error(prompt: Prompt) -> float:
            exact, half = (model.logprobs(prompt, completion) for model in (self.exact, self.half))
            return float((half - exact).gather(1, exact.topk(LISTED).indices).abs().max())

        return self.bound(lambda: max(map(error, self.batch)))

    def compare(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Token]]) -> Check:
        """Compare greedy tokens with the best ones of transformers after the same tokens. By induction, equal ones are
        those of its greedy search."""
        gaps = [self._gaps(prompt, tokens) for prompt, tokens in zip(prompts, completions, strict=True)]
        wrong = {
            f"{prompt.name}: first {int(gap.nonzero()[0])} of {len(gap)} equal"
            for prompt, gap in zip(prompts, gaps, strict=True)
            if gap.any()
        }
        figure = "; ".join(sorted(wrong)) or f"all {sum(map(len, gaps))} equal"
        if self.dtype == "float32":
            return Check(not wrong, figure, "all equal")
        largest = max(float(gap.max()) for gap in gaps)
        allowed = 2 * self.logprob_bound[0]  # the best token and another one can both have the largest error
        below = f"at most {largest:.2g} below the best"
        return Check(largest <= allowed, f"{figure}; {below}", f"at most {allowed:.2g} below the best")

    def _gaps(self, prompt: Prompt, tokens: Sequence[Token]) -> Tensor:
        """Return by how much the exact log probability of each token is below the best one's."""
        ids = [token.id for token in tokens]
        truth = self.exact.logprobs(prompt, ids)
        return truth.amax(1) - truth.gather(1, torch.tensor(ids)[:, None])[:, 0]


async def _vision(session: Session) -> Check:
    items = [item for prompt in session.batch for item in prompt.items]
    truth = session.exact.vision_tokens(items)

    def error(rows: Tensor) -> float:
        return float((rows.float() - truth).abs().max() / truth.abs().max())

    bound, criterion = session.bound(lambda: error(session.half.vision_tokens(items)))
    passes = CUDA_PASSES if session.checkpoint.is_on_cuda else 1
    found = max(error(torch.cat(session.encoder.encode(items))) for _ in range(passes))
    return Check(found <= bound, f"largest difference {found:.2g} of the largest value", criterion)


async def _logprobs(session: Session) -> Check:
    bound, criterion = session.logprob_bound
    completions = await session.complete(session.batch, "logprobs", logprobs=LISTED)
    found = 0.0
    for prompt, tokens in zip(session.batch, completions, strict=True):
        index, listed = torch.tensor([token.top_logprobs for token in tokens], dtype=torch.float64).unbind(-1)
        truth = session.exact.logprobs(prompt, [token.id for token in tokens]).gather(1, index.long())
        found = max(found, float((listed - truth).abs().max()))
    return Check(found <= bound, f"largest difference {found:.2g}", criterion)


async def _at_once(session: Session) -> Check:
    return session.compare(session.batch, await session.complete(session.batch))


async def _alone(session: Session) -> Check:
    return session.compare(session.batch, [(await session.complete([each], "alone"))[0] for each in session.batch])


async def _same_again(session: Session) -> Check:
    again = await session.complete(session.batch)
    cached = [tokens[0].cached_tokens for tokens in again]
    is_reused = all(cached[1:])
    figure = f"{sum(cached)} prompt tokens reused"
    return session.compare(session.batch, again).also(is_reused, figure, "prompts reused")


async def _other_image(session: Session) -> Check:
    # The tokens of an image are equal to those of another one: only the content differs.
    prompts = (session.other_text, session.other_image)
    completions = [(await session.complete([prompt]))[0] for prompt in prompts]
    same, other = (tokens[0].cached_tokens for tokens in completions)
    start = session.other_text.spans[0].start
    figure = f"{same} tokens reused after the same image, {other} after another one"
    criterion = f"more than {start} reused after the same image only"
    return session.compare(prompts, completions).also(same > start >= other, figure, criterion)


async def _canceled(session: Session) -> Check:
    requests = [session.request(prompt, "canceled") for prompt in session.batch]
    limits = [CANCEL_AFTER if index % 2 else COMPLETION for index in range(len(requests))]
    completions = await asyncio.gather(*map(functools.partial(read, session.decoder), requests, limits))
    for _ in range(IDLE_POLLS):
        stats = session.decoder.snapshot()
        used = stats.running + stats.waiting + stats.kv_used + stats.states_used
        if not used:
            break
        await asyncio.sleep(0.01)
    figure = f"{used} sequences and tokens of the KV cache in use afterwards"
    return session.compare(session.batch, completions).also(not used, figure, "nothing in use afterwards")


async def _preempted(session: Session) -> Check:
    # More tokens than the KV cache holds; some are drafted, since completions of random weights repeat themselves.
    prompts = NUM_LONG * session.batch[:1]
    async with session.run_other(**OPTIONS | {"kv_cache_mib": 1}) as decoder:
        completions = await session.complete(prompts, decoder=decoder, max_tokens=LONG_COMPLETION)
        stats = decoder.snapshot()
    figure = f"{stats.preemptions} preemptions, {stats.accepted_tokens} of {stats.draft_tokens} drafted tokens accepted"
    return session.compare(prompts, completions).also(stats.preemptions > 0, figure, "preempted")


async def compare_decoder(session: Session, **options: Any) -> Check:
    """Compare the tokens of a decoder with other options; only of texts, if it takes no images."""
    async with session.run_other(**options) as decoder:
        prompts = [prompt for prompt in session.batch if not (prompt.items and decoder.unsupported_vision_reason)]
        return session.compare(prompts, await session.complete(prompts, decoder=decoder))


CHECKS: dict[str, Callable[[Session], Awaitable[Check]]] = {
    "vision encoder, 3 images, 1 video": _vision,
    f"log probabilities, {LISTED} of each step": _logprobs,
    "greedy tokens of 5 at once": _at_once,
    "the same prompts, one at a time": _alone,
    "prefix cache, the same batch again": _same_again,
    "prefix cache, images": _other_image,
    f"2 of 5 canceled after {CANCEL_AFTER} tokens": _canceled,
    f"{LONG_COMPLETION} tokens of {NUM_LONG} texts, preempted": _preempted,
}
"""Checks of each family and dtype, in order: the prefix cache keeps what those before decoded."""


async def check_family(results: Results, checkpoint: Checkpoint, family: str) -> None:
    """Write a tiny model to the checkpoint's folder, and run all checks of it."""
    write_model(build_model(family, SIZES["tiny"]), checkpoint.folder)
    exact = Reference(checkpoint, torch.float32)
    half = Reference(checkpoint, torch.bfloat16)
    checks = {"float32": dict(CHECKS), "bfloat16": dict(CHECKS)}
    if checkpoint.is_on_cuda:
        for table in checks.values():
            table["without CUDA graphs"] = functools.partial(compare_decoder, **OPTIONS, cuda_graphs=False)
    for name, reason in checkpoint.other_decoders().items():
        if reason:
            results.skipped[f"{family}: {name}"] = reason
        else:
            checks["float32"][f"greedy tokens of {name}"] = functools.partial(
                compare_decoder, decoder=name, max_model_len=1024
            )
    # cuDNN rounds to TF32 by default, also in transformers' patch embedding, a convolution.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for dtype, table in checks.items():
            async with checkpoint.decoding(checkpoint.config(dtype, **OPTIONS)) as decoder:
                session = Session(checkpoint, dtype, exact, half, decoder)
                for name, check in table.items():
                    await results.check(f"{family} {dtype}: {name}", check(session))


async def read(decoder: Decoder, request: DecodeRequest, limit: int = LONG_COMPLETION) -> list[Token]:
    """Return the completion; after `limit` tokens, the request is canceled."""
    tokens: list[Token] = []
    async with contextlib.aclosing(decoder.decode(request)) as stream:
        async for token in stream:
            tokens.append(token)
            if len(tokens) == limit:
                break
    return tokens
