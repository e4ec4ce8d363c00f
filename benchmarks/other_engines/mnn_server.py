"""MNN behind OpenAI's API: mnn_server.py EXPORTED_MODEL PORT THREADS CHECKPOINT, under its own interpreter.

MNN has no server and no batching: requests are served one at a time, in the order of their arrival.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import MNN.llm  # `from MNN import llm` finds the extension module of that name
import numpy as np
from wire import Chat, serve


class Single:
    """One request at a time, with greedy decoding; the engine's own `generate` does not stream."""

    def __init__(self, model: Path, threads: int) -> None:
        self._engine = MNN.llm.create(str(model / "config.json"))
        options = {"backend_type": "cpu", "thread_num": threads, "precision": "low", "memory": "low"}
        self._engine.set_config({**options, "mllm": dict(options)})
        self._engine.load()
        self._lock = threading.Lock()

    def generate(self, chat: Chat) -> Iterator[str]:
        with self._lock, tempfile.TemporaryDirectory() as folder:
            self._engine.reset()
            self._engine.generate_init()
            tokens = self._engine.tokenizer_encode(_with_images(chat, Path(folder)))  # encodes the images too
            for _ in range(chat.max_tokens):
                logits = np.asarray(self._engine.forward(tokens).read())
                tokens = [int(logits.reshape(-1, logits.shape[-1])[-1].argmax())]
                yield self._engine.tokenizer_decode(tokens[0]) or " "


def _with_images(chat: Chat, folder: Path) -> str:
    """Return the prompt with the path and the size of each image; without a size, MNN makes it smaller."""
    prompt = chat.prompt
    for index, image in enumerate(chat.images):
        path = folder / f"{index}.png"
        image.save(path, compress_level=0)
        prompt = prompt.replace(_mark(index), f"<img><hw>{image.height},{image.width}</hw>{path}</img>")
    return prompt


def _mark(index: int) -> str:
    return f"<image {index}>"


def main() -> None:
    model, port, threads, checkpoint = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    serve(Single(model, threads).generate, model=checkpoint, port=port, mark=_mark)


if __name__ == "__main__":
    main()
