"""Base64 is decoded in slices, with the result of one call at every cut."""

from __future__ import annotations

import asyncio
import base64
import binascii
import random

import pytest

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import MediaTooLarge, MediaUndecodable
from dashinfer_vlm_core.media import source
from dashinfer_vlm_core.media.loader import MediaLoader
from dashinfer_vlm_core.media.source import SLICE, InlineSource, check_base64, from_base64, locate
from dashinfer_vlm_core.protocol import MediaPart

ESCAPES = {
    **dict.fromkeys(("%2B", "%2b"), "+"),
    **dict.fromkeys(("%2F", "%2f"), "/"),
    **dict.fromkeys(("%3D", "%3d"), "="),
    **dict.fromkeys(("%0A", "%0a", "%0D", "%0d", "%20", "%09"), ""),
}
"""In the order in which they are replaced."""

ALPHABET = ["A", "b", "9", "QUJD", "+", "-", "/", "_", "=", "==", " ", "\n", "%", *ESCAPES, "%2", "%0", "0", "A", "B"]
RARE = [*["QUJD", "QQ", "QUI", "+/-_", " \r\n", "%2B", "%3D", "="], "!", "é", "%"]
SLICES = (4, 8, 16)


def decode_in_one_call(text):
    """Decode as the specification in `from_base64` says; return None if the text is not base64."""
    for escape, character in ESCAPES.items():
        text = text.replace(escape, character)
    for character in " \t\r\n":
        text = text.replace(character, "")
    text = text.replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        return None


def size_in_one_call(text):
    escaped = sum(map(text.count, ESCAPES))
    return (len(text) - 2 * escaped - sum(map(text.count, " \t\r\n="))) * 3 // 4


def decode_or_none(text):
    try:
        return from_base64("," + text, 1, path="p")
    except MediaUndecodable:
        return None


def texts(alphabet, count, pieces):
    source = random.Random(1)
    return ["".join(source.choices(alphabet, k=source.randrange(pieces))) for _ in range(count)]


@pytest.fixture(params=SLICES)
def _slice_chars(monkeypatch, request):
    monkeypatch.setattr(source, "SLICE", request.param)


@pytest.mark.usefixtures("_slice_chars")
@pytest.mark.parametrize("alphabet", [ALPHABET, RARE, RARE[:-3]], ids=["any", "rare errors", "few errors"])
def test_slices_are_decoded_as_one_text(alphabet):
    accepted = 0
    for text in texts(alphabet, 500, 12):
        expected = decode_in_one_call(text)
        accepted += bool(expected)
        assert decode_or_none(text) == expected, text
    assert 30 < accepted < 490


NESTED = ["%2%0A0QUJD", "QUJD%0%0AA", "%%2BB", "%2%0A%0A%0AB"]
PADDED = ["QQ=%3D", "=", "QQ==QQ==", "QUI=Q", "QQ==QQ", "QUI=QUI", "QUJD=QUJD"]


@pytest.mark.usefixtures("_slice_chars")
@pytest.mark.parametrize("text", [*NESTED, *PADDED])
def test_nested_escapes_and_inner_padding_in_slices(text):
    assert decode_or_none(text) == decode_in_one_call(text)


def test_size_is_counted_without_what_is_ignored():
    for text in texts(ALPHABET, 500, 20):
        size = size_in_one_call(text)
        check_base64("%2B" + text, 3, limit=size, path="p")
        if size > 0:
            with pytest.raises(MediaTooLarge):
                check_base64("%2B" + text, 3, limit=size - 1, path="p")


@pytest.mark.parametrize("length", [SLICE // 4 * 3, SLICE, 2 * SLICE + 1, 3 * SLICE + 2])
def test_large_data_is_decoded(length):
    data = random.Random(length).randbytes(length)
    assert from_base64(base64.b64encode(data).decode(), path="p") == data
    lines = base64.encodebytes(data).decode().replace("+", "%2B").replace("/", "_")
    assert from_base64(lines, path="p") == data


def find(url):
    found = locate(url, kind="video", path="p", config=EngineConfig())
    assert isinstance(found, InlineSource)
    return found


@pytest.mark.parametrize("header", [":;base64", ":" + "x" * SLICE + ";base64", ":;BASE64" + " " * (2 * SLICE + 3)])
def test_header_of_any_length(header):
    assert find(f"data{header},QUJD").start == len(header) + 5


@pytest.mark.parametrize("header", ["", ":;base64x", ":base64", ":;base64" + " " * SLICE + "x", ":;bas" + "e" * SLICE])
def test_other_header_is_an_error(header):
    with pytest.raises(MediaUndecodable):
        locate(f"data:{header},QUJD", kind="image", path="p", config=EngineConfig())


def test_equal_urls_share_one_source(monkeypatch):
    url, other = "data:;base64,AAAAAAAA", "data:;base64,AAAAAAAB"
    urls = [f"{url[:9]}{url[9:]}", other, f"{url[:9]}{url[9:]}"]
    parts = [MediaPart(kind="image", path=f"p[{i}]", url=url) for i, url in enumerate(urls)]
    decoded = []

    def decode(source):
        decoded.append(source.url)
        return source.url

    async def process(part, data):
        return data

    async def load():
        loader = MediaLoader(EngineConfig(limit_mm_per_prompt={"image": 3}), [])
        try:
            return await loader.load(parts, process)
        finally:
            await loader.close()

    monkeypatch.setattr("dashinfer_vlm_core.media.loader.decode", decode)
    assert asyncio.run(load()) == ([url], [other], [url])
    assert sorted(decoded) == [url, other]
