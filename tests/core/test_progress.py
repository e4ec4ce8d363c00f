from __future__ import annotations

import logging

import pytest

from dashinfer_vlm_core import progress
from dashinfer_vlm_core.progress import Progress, show_progress
from tests.waiting import until


@pytest.fixture
def messages(caplog, monkeypatch):
    """The records of the progress, which are written without delay."""
    monkeypatch.setattr(progress, "LOG_SECONDS", 0)
    monkeypatch.setattr(progress, "REDRAW_SECONDS", 0.001)
    caplog.set_level(logging.INFO, logger=progress.__name__)
    return lambda: list(caplog.messages)


def test_newest_progress_is_logged_also_without_updates(messages):
    with show_progress("Loading demo"):
        assert messages()[0] == "Loading demo ..."
        until(lambda: messages()[-1].startswith("Loading demo: 00:"))
        with Progress(total=2, desc="Loading layers", unit="") as bar:
            bar.update()
            until(lambda: messages()[-1].startswith("Loading layers: 1/2, 00:"))
            until(lambda: all(text.startswith("Loading layers") for text in messages()[-5:]))
        until(lambda: messages()[-1].startswith("Loading demo: 00:"))
    assert not Progress._open


def test_records_have_a_minimum_distance(messages, monkeypatch):
    monkeypatch.setattr(progress, "LOG_SECONDS", 1000)
    with show_progress("Loading demo"), Progress(total=100, desc="Reading", unit="B", unit_scale=True) as bar:
        for _ in range(100):
            bar.update()
    first, last = messages()
    assert first == "Loading demo ..."
    assert last.startswith("Loading demo: 00:")  # how long it took


def test_failed_work_is_not_shown_any_longer():
    with pytest.raises(ValueError, match="broken"), show_progress("Loading demo"), Progress(total=2):
        raise ValueError("broken")
    assert not Progress._open
