"""OpenVINO GenAI behind OpenAI's API: openvino_server.py EXPORTED_MODEL PORT THREADS, under its own interpreter.

A single user is served by VLMPipeline, several by ContinuousBatchingPipeline with its prefix cache: each what OpenVINO
offers for the case.
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
from wire import Chat, serve

CACHE_GIB = 2


class Batched:
    """One thread that steps; requests come from many."""

    def __init__(self, pipeline: genai.ContinuousBatchingPipeline) -> None:
        self._pipeline = pipeline
        self._tokenizer = pipeline.get_tokenizer()
        self._numbers = itertools.count()
        self._running: list[tuple[genai.GenerationHandle, queue.Queue[int | None]]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def answer(self, chat: Chat) -> Iterator[str]:
        tokens: queue.Queue[int | None] = queue.Queue()
        pictures = [as_tensor(picture) for picture in chat.pictures]
        # It encodes pictures itself, in the caller's thread.
        number = next(self._numbers)
        if pictures:
            handle = self._pipeline.add_request(number, chat.prompt, pictures, options(chat))
        else:
            handle = self._pipeline.add_request(number, chat.prompt, options(chat))
        with self._changed:
            self._running.append((handle, tokens))
            self._changed.notify()
        for _ in range(chat.max_tokens):
            token = tokens.get()
            if token is None:
                return
            yield self._tokenizer.decode([token], skip_special_tokens=False)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running)
            self._pipeline.step()
            with self._changed:
                self._running = [pair for pair in self._running if self._deliver(*pair)]

    def _deliver(self, handle: genai.GenerationHandle, tokens: queue.Queue[int | None]) -> bool:
        """Whether it goes on."""
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

    def answer(self, chat: Chat) -> Iterator[str]:
        tokens: queue.Queue[int | None] = queue.Queue()
        threading.Thread(target=self._generate, args=(chat, tokens)).start()
        while (token := tokens.get()) is not None:
            yield self._tokenizer.decode([token], skip_special_tokens=False)

    def _generate(self, chat: Chat, tokens: queue.Queue[int | None]) -> None:
        try:
            pictures = {"images": [as_tensor(picture) for picture in chat.pictures]} if chat.pictures else {}
            self._pipeline.generate(chat.prompt, **pictures, generation_config=options(chat), streamer=Streamer(tokens))
        finally:
            tokens.put(None)


class Streamer(genai.StreamerBase):
    def __init__(self, tokens: queue.Queue[int | None]) -> None:
        super().__init__()
        self._tokens = tokens

    def write(self, token: int | list[int]) -> genai.StreamingStatus:
        for one in token if isinstance(token, list) else [token]:
            self._tokens.put(one)
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """What is to be told when the answer ends, is told by the caller."""


def options(chat: Chat) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = chat.max_tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    return config


def as_tensor(picture: object) -> openvino.Tensor:
    return openvino.Tensor(np.asarray(picture))


def main() -> None:
    model, port, threads = Path(sys.argv[1]), int(sys.argv[2]), {"INFERENCE_NUM_THREADS": int(sys.argv[3])}
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.enable_prefix_caching = True
    batched = Batched(genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", threads))
    single = Single(genai.VLMPipeline(str(model), "CPU", **threads))

    def answer(chat: Chat) -> Iterator[str]:
        return (single if chat.alone else batched).answer(chat)

    serve(answer, model=model, port=port, mark="<ov_genai_image_{}>".format)


if __name__ == "__main__":
    main()
