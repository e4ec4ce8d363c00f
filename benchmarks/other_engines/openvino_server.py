"""OpenVINO GenAI behind OpenAI's API: openvino_server.py EXPORTED_MODEL PORT THREADS [PRECISION], in its environment.

A single user is served by VLMPipeline, several by ContinuousBatchingPipeline with its prefix cache, as OpenVINO
intends.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai
from wire import Chat, serve, start

CACHE_GIB = 2
Tokens = queue.Queue[int | None]
"""The tokens of one response as they arrive; None ends it."""


class Batched:
    """A thread that encodes images and runs steps; requests come from many threads.

    Both run in one thread, as in the pipeline's own `generate`: with two threads, encoding competes with steps for the
    cores, and several users are served at less than half the speed.
    """

    def __init__(self, pipeline: genai.ContinuousBatchingPipeline) -> None:
        self._pipeline = pipeline
        self._tokenizer = pipeline.get_tokenizer()
        self._numbers = itertools.count()
        self._arrived: queue.Queue[tuple[Chat, Tokens]] = queue.Queue()
        self._running: list[tuple[genai.GenerationHandle, Tokens]] = []
        start(self._work)

    def generate(self, chat: Chat) -> Iterator[str]:
        tokens: Tokens = queue.Queue()
        self._arrived.put((chat, tokens))
        while (token := tokens.get()) is not None:
            yield self._tokenizer.decode([token], skip_special_tokens=False)

    def _work(self) -> None:
        while True:
            while not self._running or not self._arrived.empty():
                self._begin(*self._arrived.get())
            self._pipeline.step()
            self._running = [pair for pair in self._running if self._deliver(*pair)]

    def _begin(self, chat: Chat, tokens: Tokens) -> None:
        """Add a request; this encodes its images."""
        number, images = next(self._numbers), [as_tensor(image) for image in chat.images]
        given = (chat.prompt, images, options(chat)) if images else (chat.prompt, options(chat))
        self._running.append((self._pipeline.add_request(number, *given), tokens))

    def _deliver(self, handle: genai.GenerationHandle, tokens: Tokens) -> bool:
        """Deliver the newest tokens; return whether the request continues."""
        goes_on = True
        while handle.can_read():
            for output in handle.read().values():
                for token in output.generated_ids:
                    tokens.put(token)
                goes_on = goes_on and output.finish_reason == genai.GenerationFinishReason.NONE
        if not goes_on:
            tokens.put(None)
        return goes_on


class Single:
    """One request at a time."""

    def __init__(self, pipeline: genai.VLMPipeline) -> None:
        self._pipeline = pipeline
        self._tokenizer = pipeline.get_tokenizer()

    def generate(self, chat: Chat) -> Iterator[str]:
        tokens: Tokens = queue.Queue()
        threading.Thread(target=self._generate, args=(chat, tokens)).start()
        while (token := tokens.get()) is not None:
            yield self._tokenizer.decode([token], skip_special_tokens=False)

    def _generate(self, chat: Chat, tokens: Tokens) -> None:
        try:
            images = {"images": [as_tensor(image) for image in chat.images]} if chat.images else {}
            self._pipeline.generate(chat.prompt, **images, generation_config=options(chat), streamer=Streamer(tokens))
        finally:
            tokens.put(None)


class Streamer(genai.StreamerBase):
    def __init__(self, tokens: Tokens) -> None:
        super().__init__()
        self._tokens = tokens

    def write(self, token: int | list[int]) -> genai.StreamingStatus:
        for one in token if isinstance(token, list) else [token]:
            self._tokens.put(one)
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Do nothing: the caller reports the end of the response."""


def options(chat: Chat) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = chat.max_tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    return config


def as_tensor(image: object) -> openvino.Tensor:
    return openvino.Tensor(np.asarray(image))


def main() -> None:
    model, port = Path(sys.argv[1]), int(sys.argv[2])
    threads = {"INFERENCE_NUM_THREADS": int(sys.argv[3])}
    hints = {"INFERENCE_PRECISION_HINT": sys.argv[4]} if sys.argv[4:] else {}
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.enable_prefix_caching = True
    batched = Batched(genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", threads | hints))
    single = Single(genai.VLMPipeline(str(model), "CPU", **threads, **hints))

    def generate(chat: Chat) -> Iterator[str]:
        return (single if chat.alone else batched).generate(chat)

    serve(generate, model=model, port=port, mark="<ov_genai_image_{}>".format)


if __name__ == "__main__":
    main()
