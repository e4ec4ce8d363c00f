"""Progress of long work: a bar in a terminal or notebook, lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

logger: logging.Logger = logging.getLogger(__name__)

LOG_SECONDS = 4.0
"""Minimum time between two records. With `REDRAW_SECONDS`, it takes less than five seconds until the next one."""

REDRAW_SECONDS = 0.5

BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{unit} [{elapsed}<{remaining}, {rate_fmt}]"
LOG_FORMAT = "{desc}: {n_fmt}/{total_fmt}{unit}, {elapsed} elapsed, {remaining} left"
ELAPSED_FORMAT = "{desc}: {elapsed} elapsed"


class Progress(tqdm):  # type: ignore[misc]
    """tqdm's bar on standard error if that is a terminal or a notebook; otherwise, log records, or lines on standard
    error if logging is not configured.

    Without a total, it shows the elapsed time. A thread redraws it, so that it also moves while nothing is updated. Of
    several at the same time, the newest is shown.

    Args:
        args: as for `tqdm`.
        options: as for `tqdm`.

    Attributes:
        uses_bars: whether bars are shown in a terminal.
        bar_text: tqdm's format of the bar.
        log_text: tqdm's format of the records, if there is a total.
    """

    uses_bars: ClassVar[bool] = True
    bar_text: ClassVar[str] = BAR_FORMAT
    log_text: ClassVar[str] = LOG_FORMAT
    monitor_interval = 0  # tqdm's own thread for redrawing
    _open: ClassVar[dict[Progress, None]] = {}
    _next_record: ClassVar[float] = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        self._is_bar = shows_bars()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="dashinfer-vlm-progress", daemon=True)
        options |= {"leave": False, "position": 0, "miniters": 1, "bar_format": self.bar_text}
        options["nrows"] = 2  # otherwise, there is no bar in a terminal of unknown size
        super().__init__(*args, **options, file=None if self._is_bar else io.StringIO())
        if self.disable:
            return
        if self.total is None:
            self.bar_format = ELAPSED_FORMAT
        if not self._is_bar and not self._open:
            self._record(f"{self.desc} ...")
        self._open[self] = None
        self._thread.start()

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draw the bar, or `msg` in its place, unless a newer one is shown."""
        is_shown = self._is_bar and (msg is not None or self._is_newest())
        return is_shown and bool(super().display(msg, pos))

    def close(self) -> None:
        if self in self._open:
            del self._open[self]
            self._closed.set()
            self._thread.join()
            if not self._is_bar and not self._open:
                self._record(self._line())
        super().close()

    def _is_newest(self) -> bool:
        return any(bar is self for bar in list(self._open)[-1:])

    def _redraw(self) -> None:
        while not self._closed.wait(REDRAW_SECONDS):
            if self._is_bar:
                self.refresh()
            elif self._is_newest() and time.monotonic() >= Progress._next_record:
                self._record(self._line())

    def _line(self) -> str:
        line_format = self.log_text if self.total else ELAPSED_FORMAT
        return str(self.format_meter(**{**self.format_dict, "bar_format": line_format}))

    def _record(self, text: str) -> None:
        Progress._next_record = time.monotonic() + LOG_SECONDS
        if logger.hasHandlers() or sys.stderr is None:
            logger.info("%s", text)
        else:
            sys.stderr.write(f"{text}\n")


Progress.set_lock(threading.RLock())  # tqdm's default is a lock between processes


def shows_bars() -> bool:
    """Return whether progress is shown as bars here; a notebook's standard error is not a terminal."""
    return Progress.uses_bars and ("ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty()))


@contextlib.contextmanager
def show_progress(text: str) -> Iterator[None]:
    """Show `text` and the elapsed time during the block. In a terminal, log records are written above the line."""
    redirect = logging_redirect_tqdm(tqdm_class=Progress) if shows_bars() else contextlib.nullcontext()
    with Progress(desc=text), redirect:
        yield
