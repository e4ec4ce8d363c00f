"""Rule 23: a damaged file that crashes a video library costs its own request only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.conftest import LIMITS, running_server, text, video_data

pytest.importorskip("decord", reason="decord has no wheel for this platform")

SAMPLE = (Path(__file__).parents[2] / "examples" / "pictures" / "moving.mp4").read_bytes()
WITHOUT_EDITS = SAMPLE.replace(b"elst", b"free")
"""Frames of a file with an edit list are counted first, which finds much of the damage."""

CRASHES = {
    "first": [(3038, 218), (332, 224), (3918, 213), (1468, 179)],
    "second": [(791, 96), (3883, 229), (396, 213), (39, 97)],
    "third": [(3788, 241), (3894, 3), (2951, 171), (648, 30)],
    "fourth": [(2356, 65), (3918, 141), (1263, 90), (1623, 255)],
    "fifth": [(4002, 139), (3918, 235), (795, 245), (127, 8)],
}
"""Bytes of WITHOUT_EDITS, by position, with which decord 0.6.0 ends its process by a segmentation fault."""


def damaged(changes):
    data = bytearray(WITHOUT_EDITS)
    for position, value in changes:
        data[position] = value
    return bytes(data)


@pytest.fixture(scope="module")
def decord_server():
    with running_server(video_reader="decord", **LIMITS) as server:
        yield server


@pytest.mark.parametrize("changes", CRASHES.values(), ids=CRASHES)
def test_security_23_crash_of_decord_fails_one_request(decord_server, changes):
    words = text("Which way does the circle move?")
    message = decord_server.rejection(video_data(damaged(changes)), words, code="media_undecodable")
    assert message == (
        "The process that decodes the video ended unexpectedly. The file may be damaged, or need too much memory: save"
        " it again."
    )
    assert decord_server.chat(video_data(SAMPLE), words).status_code == 200
