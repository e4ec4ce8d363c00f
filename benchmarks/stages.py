"""The time of an image request, stage by stage, in the components that serve it.

    python -m benchmarks.stages [--model NAME|FOLDER] [--repeats 5] [any option of dashinfer-vlm serve]

Each stage runs alone, with new content each time, so that no cache helps. Not called `profile`: the standard library
has a module of that name, which torch imports, and a script started by its path would find this one first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click
import httpx
import torch
import uvicorn

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.concurrency.compute import CPU_EXECUTOR
from dashinfer_vlm_core.decoders import DecodeRequest, Token, VisualSpan
from dashinfer_vlm_core.engine import load_pipeline
from dashinfer_vlm_core.engine.chat_pipeline import ChatPipeline
from dashinfer_vlm_core.engine.observers import RequestObserver
from dashinfer_vlm_core.media import Image
from dashinfer_vlm_core.media.fetch import Fetcher
from dashinfer_vlm_core.media.image import decode_image
from dashinfer_vlm_core.models.interface import Patches, VisualTokens
from dashinfer_vlm_core.models.patches import with_digest
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.preprocessing.prompt import Prompt
from dashinfer_vlm_core.protocol import ChatRequest
from dashinfer_vlm_core.response.response_builder import PromptCounts, ResponseBuilder
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server import create_app
from dashinfer_vlm_torch.sampler import launch_sample
from dashinfer_vlm_torch.sequence import LogitsRow, SequenceState

from .client import EngineTarget, HTTPTarget, Talk, Target, load, request_body
from .limits import Rates, cores, image_patches, measure_rates, prefill_flop, step_seconds, vision_flop
from .models import CACHE, checkpoint
from .workloads import jpeg, question_part, words

TOKENS = 32
"""Completion tokens of a request."""
BATCH = 8
PART = "messages[0].content[0]"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One row of the table.

    Attributes:
        name: the stage's name.
        seconds: the median time of one execution.
        times: executions in a request of an image and `TOKENS` tokens; 0 for additional measurements.
        limit: the minimum seconds on this machine, if known.
    """

    name: str
    seconds: float
    times: int = 1
    limit: float | None = None


class Clock:
    """Collects the seconds of named pieces of work."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name].append(time.perf_counter() - begin)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


class ImageServer(ThreadingHTTPServer):
    """A server of a new image at any path of a loopback port."""

    def __init__(self, source: random.Random) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = jpeg(source)
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Do not log requests."""

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/image.jpg"

    @contextlib.contextmanager
    def running(self) -> Iterator[ImageServer]:
        thread = threading.Thread(target=self.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


@contextlib.asynccontextmanager
async def opened(config: EngineConfig) -> AsyncIterator[ChatPipeline]:
    pipeline = await load_pipeline(config, load_plugins(), RequestObserver())
    try:
        yield pipeline
    finally:
        await pipeline.close()


async def measure(config: EngineConfig, rates: Rates, repeats: int) -> list[Stage]:
    """Measure all stages, in the order of a request."""
    source, clock = random.Random("stages"), Clock()
    async with opened(config) as pipeline, contextlib.AsyncExitStack() as stack:
        images = stack.enter_context(ImageServer(source).running())
        fetcher = Fetcher(config)
        stack.push_async_callback(fetcher.close)
        await _one(Clock(), pipeline, fetcher, images.url, source)  # warms up lazily loaded parts
        for _ in range(repeats):
            prompt = await _one(clock, pipeline, fetcher, images.url, source)
            await _batch(clock, pipeline, source)
            await _encoder_pass(clock, pipeline, source)
            _sampling(clock, pipeline)
    await _transport(clock, repeats)
    return _stages(clock, pipeline, rates, len(prompt))


async def _one(clock: Clock, pipeline: ChatPipeline, fetcher: Fetcher, url: str, source: random.Random) -> Prompt:
    """Run one request, component by component."""
    with clock.time("parse"):
        request = ChatRequest.parse(_body(url, source))
    with clock.time("fetch"):
        data = await fetcher.get(httpx.URL(url), kind="image", path=PART)
    with clock.time("decode"):
        image = decode_image(data, path=PART, max_pixels=1 << 24, background=(255, 255, 255))
    with clock.time("resize"):
        patches = with_digest(pipeline.inputs.processor.process(Image(image=image, path=PART)))
    with clock.time("encoder"):
        visual = await pipeline.inputs.vision.embed([patches])
    with clock.time("prompt"):
        prompt = pipeline.inputs.prompts.build(request, [patches])
    tokens = await _decode(clock, pipeline, _decode_request(request, prompt, visual))
    _detokenize(clock, pipeline, request, tokens)
    return prompt


def _body(url: str, source: random.Random) -> dict[str, object]:
    image = {"type": "image_url", "image_url": {"url": url}}
    return request_body([{"role": "user", "content": [image, question_part(source)]}], TOKENS, users=1)


def _decode_request(request: ChatRequest, prompt: Prompt, visual: Sequence[VisualTokens]) -> DecodeRequest:
    return DecodeRequest(
        id="benchmark",
        token_ids=prompt.token_ids,
        positions=prompt.positions,
        spans=tuple(
            VisualSpan(start=span.start, tokens=visual[span.item], row=span.row, length=span.length)
            for span in prompt.spans
        ),
        sampling=replace(request.sampling(), max_tokens=request.max_tokens),
    )


async def _decode(clock: Clock, pipeline: ChatPipeline, request: DecodeRequest) -> list[Token]:
    """Decode a request; the first token's time includes prefill and sampling. A step's time is the mean of the request:
    several tokens may wait for this reader."""
    tokens, arrivals = list[Token](), [time.perf_counter()]
    async with contextlib.aclosing(pipeline.decoder.decode(request)) as stream:
        async for token in stream:
            arrivals.append(time.perf_counter())
            tokens.append(token)
    begin, first, *_, last = arrivals
    clock.seconds["prefill"].append(first - begin)
    clock.seconds["step"].append((last - first) / (len(tokens) - 1))
    return tokens


def _detokenize(clock: Clock, pipeline: ChatPipeline, request: ChatRequest, tokens: Sequence[Token]) -> None:
    builder = ResponseBuilder(
        tokenizer=pipeline.inputs.prompts.tokenizer,
        request=request,
        id="benchmark",
        created=0,
        model=pipeline.name,
        counts=PromptCounts(prompt_tokens=1),
    )
    for token in tokens:
        with clock.time("detokenize"):
            builder.add_token(token)


async def _batch(clock: Clock, pipeline: ChatPipeline, source: random.Random) -> None:
    """Measure steps of `BATCH` responses to short prompts that start together."""
    gaps = Clock()

    async def decode() -> None:
        body = request_body([{"role": "user", "content": words(source, 8)}], TOKENS, users=BATCH)
        request = ChatRequest.parse(body)
        await _decode(gaps, pipeline, _decode_request(request, pipeline.inputs.prompts.build(request, []), []))

    await asyncio.gather(*(decode() for _ in range(BATCH)))
    clock.seconds["batch"].append(gaps.median("step"))


async def _encoder_pass(clock: Clock, pipeline: ChatPipeline, source: random.Random) -> None:
    """Encode four images in one pass of the vision encoder."""
    items = [_patches(pipeline, source) for _ in range(4)]
    with clock.time("pass"):
        await pipeline.inputs.vision.embed(items)


def _patches(pipeline: ChatPipeline, source: random.Random) -> Patches:
    image = decode_image(jpeg(source), path=PART, max_pixels=1 << 24, background=(255, 255, 255))
    return with_digest(pipeline.inputs.processor.process(Image(image=image, path=PART)))


def _sampling(clock: Clock, pipeline: ChatPipeline) -> None:
    """Measure greedy sampling, as in the workloads, and sampling with temperature and `top_p`, as in typical use."""
    logits = torch.randn(BATCH, pipeline.spec.vocab_size)
    for name, options in (("greedy", {"temperature": 0}), ("drawn", {"temperature": 0.7, "top_p": 0.9, "seed": 1})):
        request = ChatRequest.parse({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **options})
        prompt = pipeline.inputs.prompts.build(request, [])
        run = SequenceState(_decode_request(request, prompt, []), pipeline.spec.tokens.stop)
        with clock.time(f"{name} 1"):
            CPU_EXECUTOR.run(functools.partial(_sample, logits[:1], [run]))
        with clock.time(f"{name} {BATCH}"):
            CPU_EXECUTOR.run(functools.partial(_sample, logits, [run] * BATCH))


@torch.inference_mode()
def _sample(logits: torch.Tensor, runs: list[SequenceState]) -> None:
    launch_sample(logits, list(map(LogitsRow, runs))).read()


async def _transport(clock: Clock, repeats: int) -> None:
    """Measure the overhead of HTTP, JSON and server-sent events: scripted responses from an engine and from its server.

    Client and server share this process and its GIL, so this is an upper bound.
    """
    with scripted_engine("a" + " a" * (TOKENS - 2)) as engine, serving(engine) as url:
        direct, served = EngineTarget(engine), HTTPTarget(url)
        async with served:
            for _ in range(4 * repeats):
                await _timed(direct, clock.seconds["engine"], clock.seconds["engine first"])
                await _timed(served, clock.seconds["server"], clock.seconds["server first"])


async def _timed(target: Target, whole: list[float], first: list[float]) -> None:
    (sample,) = await load(target, [Talk(turns=("Hello",), tokens=TOKENS)], users=1)
    first.append(sample.ttft)
    whole.append(sample.arrivals[-1] - sample.arrivals[0])


@contextlib.contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """Run a server in a separate thread and yield its address."""
    server = uvicorn.Server(uvicorn.Config(create_app(engine), port=0, log_config=None, ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()


def _stages(clock: Clock, pipeline: ChatPipeline, rates: Rates, prompt: int) -> list[Stage]:
    folder = pipeline.spec.folder
    speed = rates.bf16_gflop_s * 1e9
    encoder = vision_flop(folder, image_patches(folder)) / speed
    prefill = prefill_flop(pipeline.spec.text, prompt) / speed
    step = step_seconds(folder, rates)
    first = max(0.0, clock.median("server first") - clock.median("engine first"))
    chunk = max(0.0, clock.median("server") - clock.median("engine")) / (TOKENS - 1)
    timed = clock.median
    return [
        Stage(name="request: JSON to ChatRequest", seconds=timed("parse")),
        Stage(name="fetch a JPEG of 448x448, over loopback", seconds=timed("fetch")),
        Stage(name="decode it", seconds=timed("decode")),
        Stage(name="resize, patchify, digest", seconds=timed("resize")),
        Stage(name="vision encoder", seconds=timed("encoder"), limit=encoder),
        Stage(name="prompt: template, tokens, positions", seconds=timed("prompt")),
        Stage(name=f"prefill of {prompt} tokens, first token", seconds=timed("prefill"), limit=prefill),
        Stage(name="decode step, 1 response", seconds=timed("step"), times=TOKENS - 1, limit=step),
        Stage(name="text of a token, its chunk", seconds=timed("detokenize"), times=TOKENS),
        Stage(name="server: up to the first chunk", seconds=first),
        Stage(name="server: each further chunk", seconds=chunk, times=TOKENS - 1),
        Stage(name=f"decode step, {BATCH} responses", seconds=timed("batch"), times=0, limit=step),
        Stage(name="vision encoder, 4 images in one pass", seconds=timed("pass"), times=0, limit=4 * encoder),
        *(
            Stage(name=f"of a step: sampling, {kind}, {count} responses", seconds=timed(f"{kind} {count}"), times=0)
            for kind in ("greedy", "drawn")
            for count in (1, BATCH)
        ),
    ]


def markdown(stages: Sequence[Stage], rates: Rates, model: str) -> str:
    whole = sum(stage.times * stage.seconds for stage in stages)
    lines = [
        (
            f"Model {model}, {cores()} cores; memory reads {rates.read_gb_s:.0f} GB/s, bfloat16 products"
            f" {rates.bf16_gflop_s:.0f} GFLOP/s. A request of one image and {TOKENS} tokens: {1000 * whole:.0f} ms."
        ),
        "",
        "| stage | ms | times in a request | share | limit, ms | share of the limit's speed |",
        "|---|---|---|---|---|---|",
    ]
    for stage in stages:
        share = f"{100 * stage.times * stage.seconds / whole:.1f} %" if stage.times else ""
        limit = f"{1000 * stage.limit:.2f} | {stage.limit / stage.seconds:.2f}" if stage.limit else " | "
        lines.append(f"| {stage.name} | {1000 * stage.seconds:.3f} | {stage.times or ''} | {share} | {limit} |")
    return "\n".join(lines)


@click.command(cls=EngineCommand, help=__doc__)
@click.option("--repeats", default=5, show_default=True)
@click.option("--models", type=click.Path(path_type=Path), default=CACHE, help="Folder of created models.")
def main(*, repeats: int, models: Path, config: EngineConfig) -> None:
    model = str(checkpoint(config.model, models))
    # With speculation, the time between two tokens would not be that of a step.
    changes = {"model": model, "allow_private_addresses": True, "speculative_method": "none"}
    config = config.model_copy(update=changes)
    torch.set_num_threads(cores())
    rates = measure_rates()
    stages = asyncio.run(measure(config, rates, repeats))
    print(markdown(stages, rates, Path(model).name))


if __name__ == "__main__":
    main()
