"""What is compared with transformers, and within which bounds.

The tiny models' weights are stored in bfloat16, so that the exact results are those of transformers in float32, and the
engine computes from the same weights in both data types.

float32: the visual tokens and the log probabilities must equal transformers' within `FLOAT32_BOUND`, which leaves space
for another order of summation, and every greedy token must be the same as that of transformers' `generate`.

bfloat16: two correct implementations round at different points, so equal numbers cannot be required. The error against
the exact results may be at most `BFLOAT16_FACTOR` times the error that transformers itself has in bfloat16. A greedy
token passes if it is the exact best one, or if its exact log probability is below the best one's by no more than the
errors of the two log probabilities together, twice that bound: only such tokens can change places by rounding.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders import Decoder, DecodeRequest, DecoderStats, Sampling, Token
from dashinfer_vlm_core.kernels import KernelSelector
from dashinfer_vlm_core.plugins import Registry

from .prompts import PromptBuilder, PromptSet, TinyPrompt
from .reference import Reference
from .tiny_models import write_tiny_model

COMPLETION = 16
"""Tokens of each completion."""
LISTED = 20
"""Log probabilities that the decoder reports for each token."""
CANCEL_AFTER = 3
"""Tokens after which a request is canceled."""
IDLE_SECONDS = 10.0
"""Maximum time until the decoder has freed what canceled requests used: the end of a step."""
FLOAT32_BOUND = 1e-3
"""Of the largest visual token's value, and of a log probability."""
BFLOAT16_FACTOR = 2.0
DTYPES = ("float32", "bfloat16")
GREEDY = Sampling(temperature=0, max_tokens=COMPLETION, ignore_eos=True, logprobs=LISTED)
SAMPLING_OPTIONS = {
    "top_p": Sampling(temperature=1.0, top_p=0.8, seed=1),
    "top_k": Sampling(temperature=0.7, top_k=20, seed=2),
    "penalties": Sampling(temperature=0, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3),
    "bias, min_tokens": Sampling(temperature=0, logit_bias={7: 4.0, 9: -4.0}, min_tokens=5),
    "wide nucleus": Sampling(temperature=2.0, top_p=0.9999, seed=3, logprobs=5),
}


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


class _Bound(NamedTuple):
    """The largest error that passes, as a number and in words."""

    value: float
    criterion: str


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """A tiny model, and what it is compared with.

    Attributes:
        registry: has the family and the decoder.
        device: as torch names it.
        family: the `model_type`.
        folder: of the checkpoint.
        prompts: what it completes.
        exact: transformers in float32.
        half: transformers in bfloat16.
    """

    registry: Registry
    device: str
    family: str
    folder: Path
    prompts: PromptSet
    exact: Reference
    half: Reference

    @property
    def items(self) -> list[Any]:
        """The images and videos of the batch, in order."""
        return [item for prompt in self.prompts.batch for item in prompt.items]


@dataclass(frozen=True, kw_only=True)
class _Completions:
    """The engine's results in one dtype.

    Attributes:
        visual: the visual tokens of the batch.
        batch: the completions of the batch, decoded at the same time.
        cached: the same again, whose prompts are in the prefix cache.
        alone: the same, one after the other and without that cache.
        other_text: the completion of the prompt with the same image and another text.
        other_image: that of the prompt with another image.
        interrupted: the batch's completions while every second request is canceled.
        idle: the decoder's statistics after that.
    """

    visual: Tensor
    batch: list[list[Token]]
    cached: list[list[Token]]
    alone: list[list[Token]]
    other_text: list[Token]
    other_image: list[Token]
    interrupted: list[list[Token]]
    idle: DecoderStats


def run_checks(
    registry: Registry, *, device: str, families: Sequence[str], folder: Path, note: Callable[[str], None]
) -> list[CheckResult]:
    """Run all checks on one device, in the order of the report. A check that raises has failed.

    Args:
        registry: has the families and the decoder `torch`.
        device: as torch names it.
        families: keys of `tiny_models.FAMILIES`, at least one.
        folder: an empty one, for the tiny models.
        note: is called with the name of each check before it runs.
    """
    results = list[CheckResult]()
    with _full_float32():
        for family in families:
            note(f"{family}: making a model, and loading it in transformers")
            results += attempt(family, functools.partial(_check_family, registry, device, family, folder, note))
        note("sampling options")
        results += attempt(
            "sampling options", functools.partial(_check_sampling, registry, device, families[0], folder)
        )
    return results


def attempt(name: str, check: Callable[[], list[CheckResult]]) -> list[CheckResult]:
    """Return the results of a check; one that raises has failed."""
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


def _check_family(
    registry: Registry, device: str, family: str, folder: Path, note: Callable[[str], None]
) -> list[CheckResult]:
    model = folder / family
    model.mkdir()
    write_tiny_model(family, model)
    subject = _Subject(
        registry=registry,
        device=device,
        family=family,
        folder=model,
        prompts=PromptBuilder(registry, model).build(),
        exact=Reference(model, device=device, dtype=torch.float32),
        half=Reference(model, device=device, dtype=torch.bfloat16),
    )
    results = list[CheckResult]()
    for dtype in DTYPES:
        note(f"{family} {dtype}: vision encoder, batch, prefix cache, cancellation")
        results += attempt(f"{family} {dtype}", functools.partial(_check_dtype, subject, dtype))
    return results


def _check_dtype(subject: _Subject, dtype: str) -> list[CheckResult]:
    ours = _compute(subject, dtype)
    vision = _check_vision(subject, dtype, ours.visual)
    bound = _logprob_bound(subject, dtype, ours.batch)
    logprobs = _check_logprobs(subject, dtype, bound, ours.batch)
    tokens = _TokenCheck(subject, dtype, bound.value)
    return [
        vision,
        logprobs,
        tokens.result(f"greedy tokens of {len(ours.batch)} at once", ours.batch),
        tokens.result("the same prompts, one at a time", ours.alone),
        _check_prefix_cache(tokens, ours),
        _check_image_prefix(tokens, ours),
        _check_cancellation(tokens, ours),
    ]


def _compute(subject: _Subject, dtype: str) -> _Completions:
    config = _config(subject.folder, subject.device, dtype)
    family = subject.registry.family_of(subject.folder)
    spec = family.load_spec(subject.folder)
    kernels = KernelSelector(subject.registry.kernels.values(), config)
    encoder = family.load_vision_encoder(spec, config, kernels)
    prompts = subject.prompts
    embeddings = encoder.encode(subject.items)
    waiting = iter(embeddings)
    batch = [prompt.request([next(waiting) for _ in prompt.items], GREEDY) for prompt in prompts.batch]
    others = [
        prompt.request(encoder.encode(prompt.items), GREEDY) for prompt in (prompts.other_text, prompts.other_image)
    ]
    decoder = subject.registry.decoder("torch").create(spec, config, kernels)
    return asyncio.run(_decode_all(decoder, torch.cat(embeddings), batch, others))


def _config(folder: Path, device: str, dtype: str) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        device=device,
        dtype=dtype,
        decoder="torch",
        kv_cache_mib=64,
        prefill_chunk=64,  # the long text takes several chunks
    )


async def _decode_all(
    decoder: Decoder, visual: Tensor, batch: Sequence[DecodeRequest], others: Sequence[DecodeRequest]
) -> _Completions:
    """Run everything that is compared; a different cache salt separates what must not be found in the prefix cache."""
    alone = [replace(request, cache_salt="alone") for request in batch]
    interrupted = [replace(request, cache_salt="interrupted") for request in batch]
    await decoder.start()
    try:
        return _Completions(
            visual=visual,
            batch=await complete_all(decoder, batch),
            cached=await complete_all(decoder, batch),
            alone=[await _complete(decoder, request) for request in alone],
            other_text=await _complete(decoder, others[0]),
            other_image=await _complete(decoder, others[1]),
            interrupted=await asyncio.gather(
                *(
                    _complete(decoder, request, limit=CANCEL_AFTER if index % 2 else COMPLETION)
                    for index, request in enumerate(interrupted)
                )
            ),
            idle=await _idle_stats(decoder),
        )
    finally:
        await decoder.close()


async def _complete(decoder: Decoder, request: DecodeRequest, *, limit: int = COMPLETION) -> list[Token]:
    """Return the completion; after `limit` tokens, the request is canceled."""
    tokens = list[Token]()
    async with contextlib.aclosing(decoder.decode(request)) as stream:
        async for token in stream:
            tokens.append(token)
            if len(tokens) == limit:
                break
    return tokens


async def complete_all(decoder: Decoder, requests: Sequence[DecodeRequest]) -> list[list[Token]]:
    """Return the completions of requests that run at the same time."""
    return list(await asyncio.gather(*(_complete(decoder, request) for request in requests)))


async def _idle_stats(decoder: Any) -> DecoderStats:
    """Return the statistics when nothing runs any more, or else after `IDLE_SECONDS`."""
    end = asyncio.get_running_loop().time() + IDLE_SECONDS
    while True:
        stats: DecoderStats = decoder.snapshot()
        if _is_idle(stats) or asyncio.get_running_loop().time() > end:
            return stats
        await asyncio.sleep(0.01)


def _is_idle(stats: DecoderStats) -> bool:
    return not (stats.running or stats.waiting or stats.kv_used)


def _check_vision(subject: _Subject, dtype: str, ours: Tensor) -> CheckResult:
    truth = subject.exact.vision_tokens(subject.items).float()

    def error(rows: Tensor) -> float:
        return float((rows.float() - truth).abs().max() / truth.abs().max())

    bound = _bound(dtype, lambda: error(subject.half.vision_tokens(subject.items)))
    found = error(ours)
    kinds = [item.kind for item in subject.items]
    return CheckResult(
        name=f"{subject.family} {dtype}: vision encoder, {kinds.count('image')} images, {kinds.count('video')} video",
        passed=found <= bound.value,
        figure=f"largest difference {found:.2g} of the largest value",
        criterion=bound.criterion,
    )


def _logprob_bound(subject: _Subject, dtype: str, completions: Sequence[Sequence[Token]]) -> _Bound:
    def their_error() -> float:
        return max(
            _difference(tokens, *(model.logprobs(prompt, ids(tokens)) for model in (subject.half, subject.exact)))
            for prompt, tokens in zip(subject.prompts.batch, completions, strict=True)
        )

    return _bound(dtype, their_error)


def _check_logprobs(
    subject: _Subject, dtype: str, bound: _Bound, completions: Sequence[Sequence[Token]]
) -> CheckResult:
    found = max(
        _error(tokens, subject.exact.logprobs(prompt, ids(tokens)))
        for prompt, tokens in zip(subject.prompts.batch, completions, strict=True)
    )
    return CheckResult(
        name=f"{subject.family} {dtype}: log probabilities, {LISTED} of each step",
        passed=found <= bound.value,
        figure=f"largest difference {found:.2g}",
        criterion=bound.criterion,
    )


class _TokenCheck:
    """Compares greedy tokens with transformers', in one dtype.

    Args:
        subject: the model.
        dtype: that of the engine.
        bound: the largest error of a log probability that passes.
    """

    def __init__(self, subject: _Subject, dtype: str, bound: float) -> None:
        self.subject = subject
        self.dtype = dtype
        self._bound = bound

    @property
    def criterion(self) -> str:
        return "all equal" if self.dtype == "float32" else f"at most {2 * self._bound:.2g} below the best"

    def name(self, what: str) -> str:
        return f"{self.subject.family} {self.dtype}: {what}"

    def result(self, what: str, completions: Sequence[Sequence[Token]]) -> CheckResult:
        """Check the completions of the batch."""
        return self.check(self.name(what), dict(zip(self.subject.prompts.batch, completions, strict=True)))

    def check(
        self,
        name: str,
        completions: Mapping[TinyPrompt, Sequence[Token]],
        *,
        also: bool = True,
        figure: str = "",
        criterion: str = "",
    ) -> CheckResult:
        """Check completions; `also` is a second condition, described by `figure` and `criterion`."""
        leading = {prompt.name: self._leading(prompt, ids(tokens)) for prompt, tokens in completions.items()}
        gaps = {prompt.name: self._gap(prompt, ids(tokens)) for prompt, tokens in completions.items()}
        lengths = {prompt.name: len(tokens) for prompt, tokens in completions.items()}
        wrong = [prompt for prompt in leading if leading[prompt] < lengths[prompt]]
        passed = not wrong if self.dtype == "float32" else max(gaps.values()) <= 2 * self._bound
        parts = [f"{prompt}: first {leading[prompt]} of {lengths[prompt]} equal" for prompt in wrong]
        parts = parts or [f"all {sum(lengths.values())} equal"]
        parts.append(f"at most {max(gaps.values()):.2g} below the best")
        return CheckResult(
            name=name,
            passed=passed and also,
            figure="; ".join([*parts, *filter(None, [figure])]),
            criterion="; ".join([self.criterion, *filter(None, [criterion])]),
        )

    def _leading(self, prompt: TinyPrompt, tokens: Sequence[int]) -> int:
        """Return how many first tokens equal those of `generate`."""
        expected = self.subject.exact.greedy(prompt, COMPLETION)
        equal = (one == other for one, other in zip(tokens, expected, strict=False))
        return next((index for index, same in enumerate(equal) if not same), min(len(tokens), len(expected)))

    def _gap(self, prompt: TinyPrompt, tokens: Sequence[int]) -> float:
        """Return by how much the exact log probability of a token is below the best one's, at most."""
        truth = self.subject.exact.logprobs(prompt, tokens)
        chosen = truth[torch.arange(len(tokens)), torch.tensor(tokens)]
        return float((truth.max(dim=-1).values - chosen).max())


def _check_prefix_cache(tokens: _TokenCheck, ours: _Completions) -> CheckResult:
    cached = [completion[0].cached_tokens for completion in ours.cached]
    return tokens.check(
        tokens.name("prefix cache, the same batch again"),
        dict(zip(tokens.subject.prompts.batch, ours.cached, strict=True)),
        also=all(cached[1:]),  # the first prompt is shorter than a block
        figure=f"{sum(cached)} prompt tokens reused",
        criterion="prompts reused",
    )


def _check_image_prefix(tokens: _TokenCheck, ours: _Completions) -> CheckResult:
    """The tokens of an image are equal to those of another one: only the content differs."""
    prompts = tokens.subject.prompts
    same, other = ours.other_text[0].cached_tokens, ours.other_image[0].cached_tokens
    start = prompts.image.spans[0].start
    return tokens.check(
        tokens.name("prefix cache, images"),
        {prompts.other_text: ours.other_text, prompts.other_image: ours.other_image},
        also=same > start >= other,
        figure=f"{same} tokens reused after the same image, {other} after another one",
        criterion=f"more than {start} reused after the same image only",
    )


def _check_cancellation(tokens: _TokenCheck, ours: _Completions) -> CheckResult:
    prompts = tokens.subject.prompts.batch
    idle = ours.idle
    used = f"{idle.running} running, {idle.waiting} waiting, {idle.kv_used} tokens of the KV cache in use"
    return tokens.check(
        tokens.name(f"{len(prompts) // 2} of {len(prompts)} canceled after {CANCEL_AFTER} tokens"),
        dict(zip(prompts, ours.interrupted, strict=True)),
        also=_is_idle(idle),
        figure=f"afterwards {used}",
        criterion="nothing in use afterwards",
    )


def _bound(dtype: str, their_error: Callable[[], float]) -> _Bound:
    if dtype == "float32":
        return _Bound(FLOAT32_BOUND, f"at most {FLOAT32_BOUND:g}")
    theirs = their_error()
    bound = BFLOAT16_FACTOR * theirs
    return _Bound(bound, f"at most {bound:.2g} ({BFLOAT16_FACTOR:g} times transformers' {theirs:.2g})")


def _error(tokens: Sequence[Token], truth: Tensor) -> float:
    """Return the largest difference of the reported log probabilities from the exact ones."""
    listed = torch.tensor([[logprob for _, logprob in token.top_logprobs] for token in tokens])
    return float((listed - truth.gather(1, _listed(tokens))).abs().max())


def _difference(tokens: Sequence[Token], other: Tensor, truth: Tensor) -> float:
    """Return the same for the log probabilities of another model, of the tokens that were reported."""
    index = _listed(tokens)
    return float((other.gather(1, index) - truth.gather(1, index)).abs().max())


def _listed(tokens: Sequence[Token]) -> Tensor:
    """Return int64 [steps, LISTED]."""
    return torch.tensor([[index for index, _ in token.top_logprobs] for token in tokens])


def _check_sampling(registry: Registry, device: str, family: str, folder: Path) -> list[CheckResult]:
    """Compare sampling on the device with sampling on the CPU, both in float32."""
    prompt = PromptBuilder(registry, folder / family).build().batch[0]
    requests = [
        prompt.request([], replace(sampling, max_tokens=COMPLETION, ignore_eos=True))
        for sampling in SAMPLING_OPTIONS.values()
    ]
    here, there = (_sampled(registry, folder / family, where, requests) for where in ("cpu", device))
    wrong = [name for name, one, other in zip(SAMPLING_OPTIONS, here, there, strict=True) if one != other]
    return [
        CheckResult(
            name=f"sampling options: {'; '.join(SAMPLING_OPTIONS)}",
            passed=not wrong,
            figure=f"other tokens: {', '.join(wrong)}" if wrong else f"{len(here) * COMPLETION} tokens equal",
            criterion="tokens of the same decoder on the CPU",
        )
    ]


def _sampled(registry: Registry, model: Path, device: str, requests: Sequence[DecodeRequest]) -> list[list[int]]:
    config = _config(model, device, "float32")
    spec = registry.load_spec(model)
    kernels = KernelSelector(registry.kernels.values(), config)
    decoder = registry.decoder("torch").create(spec, config, kernels)

    async def decode() -> list[list[int]]:
        await decoder.start()
        try:
            return list(map(ids, await complete_all(decoder, requests)))
        finally:
            await decoder.close()

    return asyncio.run(decode())


def ids(tokens: Sequence[Token]) -> list[int]:
    """Return the token ids."""
    return [token.id for token in tokens]
