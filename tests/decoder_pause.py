"""Pause a decoder in the middle of a response, so that a fast machine cannot finish it too soon."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

from dashinfer_vlm_core.concurrency.compute import Executor
from dashinfer_vlm_torch.decoder import TorchDecoder
from tests.waiting import HANG


class DecoderPause:
    """Let a running decoder take some steps; the next one blocks until `release` is called. Replaces its executor.

    Args:
        decoder: a running decoder.
        steps: number of steps before it pauses.
    """

    def __init__(self, decoder: TorchDecoder, steps: int) -> None:
        assert decoder._worker is not None
        self._left = steps
        self._released = threading.Event()
        runner = decoder._worker._runner
        self._executor = runner.executor
        runner.executor = cast(Executor, self)
        runner.must_yield = lambda: True  # type: ignore[method-assign]  # each step is computed separately

    def run(self, work: Callable[[], Any]) -> Any:
        self._left -= 1
        if self._left < 0:
            self._released.wait(HANG)
        return self._executor.run(work)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def release(self) -> None:
        self._released.set()
