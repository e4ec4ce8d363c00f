"""What is compared with transformers, and within which bounds.

The tiny model's weights are stored in bfloat16, so that the exact results are those of transformers in float32, and the
engine computes from the same weights in both number types.

float32: the visual tokens and the log-probabilities must equal transformers' within `FLOAT32_BOUND`, which leaves space
for another order of summation, and every greedy token must be the same as that of transformers' `generate`.

bfloat16: two correct implementations round at different places, so equal numbers cannot be demanded. The error against
the exact results may be at most `BFLOAT16_FACTOR` times the error that transformers itself has in bfloat16. A greedy
token passes if it is the exact best one, or if its exact log-probability is below the best one's by no more than the
errors of the two log-probabilities together, twice that bound: only such tokens can change places by rounding.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders import Decoder, DecodeRequest, Sampling, Token, VisualSpan
from dashinfer_vlm_core.kernels import KernelSelector
from dashinfer_vlm_core.models.interface import VisualTokens
from dashinfer_vlm_core.models.qwen2_vl.prompt_layout import mrope_positions
from dashinfer_vlm_core.plugins import Registry
from dashinfer_vlm_torch.sampler import LogitsRow, sample
from dashinfer_vlm_torch.scheduler import SampledToken, SequenceState

from .reference import Reference
from .tiny import PREPROCESSOR, STOP, TinyPrompt, tiny_prompts, write_tiny_model

ANSWER = 24
"""Completion tokens of each request."""
LISTED = 20
"""Log-probabilities that the decoder reports for each token."""
FLOAT32_BOUND = 1e-3
"""Of the largest visual token's value, and of a log-probability."""
BFLOAT16_FACTOR = 2.0
DTYPES = ("float32", "bfloat16")
OPTIONS = {
    "top_p": Sampling(temperature=1.0, top_p=0.8, seed=1),
    "top_k": Sampling(temperature=0.7, top_k=20, seed=2),
    "penalties": Sampling(temperature=0, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3),
    "bias, min_tokens": Sampling(temperature=0, logit_bias={7: 40.0, 9: -40.0}, min_tokens=5),
    "wide nucleus": Sampling(temperature=2.0, top_p=0.9999, seed=3, logprobs=5),
}
WIDE_VOCABULARY = 4096
"""More than the sampler's fast path looks at, so that both paths run."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One line of the report.

    Attributes:
        name: what was compared.
        passed: whether it is within its bound.
        figure: what was measured.
        criterion: what it must be.
    """

    name: str
    passed: bool
    figure: str
    criterion: str


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """What is verified, and what it is compared with.

    Attributes:
        registry: has the architecture and the decoder.
        device: as torch names it.
        folder: of the tiny model.
        prompts: one batch.
        exact: transformers in float32.
        half: transformers in bfloat16.
    """

    registry: Registry
    device: str
    folder: Path
    prompts: Sequence[TinyPrompt]
    exact: Reference
    half: Reference


@dataclass(frozen=True, kw_only=True)
class _EngineResults:
    """The engine's results in one dtype: the visual tokens of all images, and the batch's completions, twice."""

    visual: Tensor
    first: list[list[Token]]
    second: list[list[Token]]


def run_checks(registry: Registry, *, device: str, folder: Path, note: Callable[[str], None]) -> list[CheckResult]:
    """Run all checks on one device, in the order of the report. A check that raises has failed.

    Args:
        registry: has the architecture `qwen2_vl` and the decoder `torch`.
        device: as torch names it.
        folder: an empty one, for the tiny model.
        note: is called with the name of each check before it runs.
    """
    write_tiny_model(folder)
    results = list[CheckResult]()
    with _full_float32():
        subject = _Subject(
            registry=registry,
            device=device,
            folder=folder,
            prompts=tiny_prompts(folder),
            exact=Reference(folder, device=device, dtype=torch.float32),
            half=Reference(folder, device=device, dtype=torch.bfloat16),
        )
        for dtype in DTYPES:
            note(f"{dtype}: vision tower, batch of {len(subject.prompts)}, prefix cache")
            results += _attempt(dtype, functools.partial(_check_dtype, subject, dtype))
        note("sampling options")
        results += _attempt("sampling options", functools.partial(_check_sampling, device))
    return results


def _attempt(name: str, check: Callable[[], list[CheckResult]]) -> list[CheckResult]:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - whatever a device raises belongs in the report
        figure = f"{type(error).__name__}: {error}".split("\n")[0][:200]
        return [CheckResult(name=name, passed=False, figure=figure, criterion="runs")]


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    """Keep cuDNN from rounding to TF32 in transformers' patch embedding, a convolution: its default, at 10 bits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _check_dtype(subject: _Subject, dtype: str) -> list[CheckResult]:
    ours = _compute(subject, dtype)
    same = [ids(tokens) for tokens in ours.second] == [ids(tokens) for tokens in ours.first]
    cached = [tokens[0].cached_tokens for tokens in ours.second]
    prefix_cache = CheckResult(
        name=f"{dtype}: prefix cache",
        passed=same and all(cached[1:]),  # the first prompt is shorter than a block
        figure=f"{'same' if same else 'OTHER'} tokens, {sum(cached)} prompt tokens reused",
        criterion="same tokens, prompts reused",
    )
    return [_check_vision(subject, dtype, ours.visual), *_check_tokens(subject, dtype, ours.first), prefix_cache]


def _compute(subject: _Subject, dtype: str) -> _EngineResults:
    config = EngineConfig(
        model=str(subject.folder),
        device=subject.device,
        dtype=dtype,
        decoder="torch",
        kv_cache_mib=64,
        prefill_chunk=64,  # the long text takes several chunks
    )
    family = subject.registry.family_of(subject.folder)
    spec = family.load_spec(subject.folder)
    kernels = KernelSelector(subject.registry.kernels.values(), config)
    tower = family.load_vision_encoder(spec, config, kernels)
    embeddings = tower.encode([image for prompt in subject.prompts for image in prompt.images])
    waiting = iter(embeddings)
    requests = [_request(prompt, [next(waiting) for _ in prompt.images]) for prompt in subject.prompts]
    decoder = subject.registry.decoder("torch").create(spec, config, kernels)
    first, second = asyncio.run(_decode_twice(decoder, requests))
    return _EngineResults(visual=torch.cat(embeddings), first=first, second=second)


def _request(prompt: TinyPrompt, embeddings: Sequence[Tensor]) -> DecodeRequest:
    grids = [image.grid for image in prompt.images]
    return DecodeRequest(
        id=prompt.name,
        token_ids=prompt.token_ids,
        positions=mrope_positions(len(prompt.token_ids), prompt.spans, grids, merge=PREPROCESSOR["merge_size"]),
        spans=tuple(
            VisualSpan(start=span.start, tokens=VisualTokens(embedding=rows, grid=image.grid, digest=image.digest))
            for span, image, rows in zip(prompt.spans, prompt.images, embeddings, strict=True)
        ),
        sampling=Sampling(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=LISTED),
    )


async def _decode_twice(
    decoder: Decoder, requests: Sequence[DecodeRequest]
) -> tuple[list[list[Token]], list[list[Token]]]:
    """Return the completions of all requests at once, and again."""

    async def complete(request: DecodeRequest) -> list[Token]:
        return [token async for token in decoder.decode(request)]

    await decoder.start()
    try:
        first = await asyncio.gather(*(complete(request) for request in requests))
        return first, await asyncio.gather(*(complete(request) for request in requests))
    finally:
        await decoder.close()


def _check_vision(subject: _Subject, dtype: str, ours: Tensor) -> CheckResult:
    images = [image for prompt in subject.prompts for image in prompt.images]
    truth = subject.exact.vision_tokens(images).float()

    def error(rows: Tensor) -> float:
        return float((rows.float() - truth).abs().max() / truth.abs().max())

    bound, criterion = _bound(dtype, lambda: error(subject.half.vision_tokens(images)))
    found = error(ours)
    return CheckResult(
        name=f"{dtype}: vision tower, {len(images)} images",
        passed=found <= bound,
        figure=f"largest difference {found:.2g} of the largest value",
        criterion=criterion,
    )


def _check_tokens(subject: _Subject, dtype: str, completions: Sequence[Sequence[Token]]) -> list[CheckResult]:
    pairs = list(zip(subject.prompts, completions, strict=True))
    truths = [subject.exact.logprobs(prompt, ids(tokens)) for prompt, tokens in pairs]

    def their_error() -> float:
        theirs = [subject.half.logprobs(prompt, ids(tokens)) for prompt, tokens in pairs]
        return max(map(_difference, completions, theirs, truths))

    bound, criterion = _bound(dtype, their_error)
    found = max(map(_error, completions, truths))
    results = [
        CheckResult(
            name=f"{dtype}: log-probabilities, {LISTED} of each step",
            passed=found <= bound,
            figure=f"largest difference {found:.2g}",
            criterion=criterion,
        )
    ]
    for (prompt, tokens), truth in zip(pairs, truths, strict=True):
        leading = _leading(ids(tokens), subject.exact.greedy(prompt, ANSWER))
        gap = float((truth.max(dim=-1).values - truth[torch.arange(len(tokens)), ids(tokens)]).max())
        results.append(
            CheckResult(
                name=f"{dtype}: greedy tokens of four at once, {prompt.name}",
                passed=leading == ANSWER if dtype == "float32" else gap <= 2 * bound,
                figure=f"first {leading} of {ANSWER} equal; at most {gap:.2g} below the best",
                criterion="all equal" if dtype == "float32" else f"at most {2 * bound:.2g} below the best",
            )
        )
    return results


def _bound(dtype: str, their_error: Callable[[], float]) -> tuple[float, str]:
    """The largest error that passes, as a number and in words."""
    if dtype == "float32":
        return FLOAT32_BOUND, f"at most {FLOAT32_BOUND:g}"
    theirs = their_error()
    bound = BFLOAT16_FACTOR * theirs
    return bound, f"at most {bound:.2g} ({BFLOAT16_FACTOR:g} times transformers' {theirs:.2g})"


def _error(tokens: Sequence[Token], truth: Tensor) -> float:
    """The largest difference of the reported log-probabilities from the exact ones."""
    listed = torch.tensor([[logprob for _, logprob in token.top_logprobs] for token in tokens])
    return float((listed - truth.gather(1, _listed(tokens))).abs().max())


def _difference(tokens: Sequence[Token], other: Tensor, truth: Tensor) -> float:
    """The same of another's log-probabilities, of the tokens that were reported."""
    index = _listed(tokens)
    return float((other.gather(1, index) - truth.gather(1, index)).abs().max())


def _listed(tokens: Sequence[Token]) -> Tensor:
    """int64 [steps, LISTED]."""
    return torch.tensor([[index for index, _ in token.top_logprobs] for token in tokens])


def _leading(ours: Sequence[int], expected: Sequence[int]) -> int:
    """How many first tokens are equal."""
    equal = (one == other for one, other in zip(ours, expected, strict=False))
    return next((index for index, same in enumerate(equal) if not same), min(len(ours), len(expected)))


def _check_sampling(device: str) -> list[CheckResult]:
    """The sampler on the device against itself on the CPU, with the same logits."""
    logits = torch.randn(len(OPTIONS), WIDE_VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2
    prompt = torch.arange(20).numpy()
    runs = []
    for name, sampling in OPTIONS.items():
        request = DecodeRequest(
            id=name, token_ids=prompt, positions=torch.arange(20).repeat(3, 1).numpy(), sampling=sampling
        )
        runs.append(SequenceState.of(request, (STOP,)))
        runs[-1].output_ids.extend((3, 3, 5))
    with torch.inference_mode():
        here, there = (sample(logits.to(where), list(map(LogitsRow, runs))) for where in ("cpu", device))
    wrong = [
        name
        for name, one, other in zip(OPTIONS, here, there, strict=True)
        if not (isinstance(one, SampledToken) and isinstance(other, SampledToken) and one.id == other.id)
    ]
    return [
        CheckResult(
            name=f"sampling options: {'; '.join(OPTIONS)}",
            passed=not wrong,
            figure=f"other tokens: {', '.join(wrong)}" if wrong else "same tokens",
            criterion="tokens of the same sampler on the CPU",
        )
    ]


def ids(tokens: Sequence[Token]) -> list[int]:
    return [token.id for token in tokens]
