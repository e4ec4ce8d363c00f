"""data: URLs, files and paths."""

from __future__ import annotations

import base64
import os

import pytest

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import MediaRefused, MediaTooLarge, MediaUndecodable, MediaUnreachable
from dashinfer_vlm_core.media.local_files import LocalSource, read
from dashinfer_vlm_core.media.source import InlineSource, RemoteSource, decode, locate
from tests.cases import cases

PART = "messages[0].content[0]"
DATA = bytes(range(256))
ENCODED = base64.b64encode(DATA).decode()


def find(text, kind="image", **options):
    return locate(text, kind=kind, path=PART, config=EngineConfig(**options))


def content(text, **options):
    source = find(text, **options)
    return decode(source) if isinstance(source, InlineSource) else read(source)


@pytest.mark.parametrize("folder", [None, "/"])
def test_base64_without_prefix_is_named(folder):
    with pytest.raises(MediaRefused, match="data:image/png;base64,") as caught:
        find(ENCODED, allowed_local_media_path=folder)
    assert caught.value.param == PART


@cases(
    "url",
    [
        f"data:image/png;base64,{ENCODED}",
        f"DATA:IMAGE/PNG;BASE64,{ENCODED}",
        f"data:;base64,{ENCODED}",
        f"data:image/png;charset=utf-8;base64,{ENCODED}",
        f"data:image/png;base64,{ENCODED.rstrip('=')}",
        f"data:image/png;base64, {ENCODED[:76]}\r\n{ENCODED[76:152]}\n\t{ENCODED[152:]}\n",
        f"data:image/png;base64,{base64.urlsafe_b64encode(DATA).decode()}",
        f"data:image/png;base64,{ENCODED.replace('+', '%2B').replace('/', '%2f').replace('=', '%3D')}",
    ],
)
def test_data_url_variants(url):
    assert content(url) == DATA


@cases(
    "url",
    [
        "data:",
        "data:image/png",
        "data:image/png;base64",
        "data:image/png,raw",
        "data:image/svg+xml;utf8,<svg/>",
        "data:image/png;base64,A",
        "data:image/png;base64,AA=A",
        "data:image/png;base64,AAA\x00",
        "data:image/png;base64,AAA!",
        "data:image/png;base64,AAA\u00e9",
        "data:image/png;base64,AAAA,AAAA",
        "data:image/png;base64,AAAA%",
        "data:image/png;base64,%ff%fe",
        "data:image/png;base64,%41%41%41%41",  # "A" needs no escape
    ],
)
def test_broken_data_url_is_named(url):
    with pytest.raises(MediaUndecodable) as caught:
        content(url)
    assert caught.value.param == PART


@pytest.mark.slow
def test_unneeded_escapes_in_base64_are_not_expanded():
    """A percent sign is not base64; unescaping in general would need a hundred times the memory."""
    for sign in ("%", "%41"):
        with pytest.raises((MediaTooLarge, MediaUndecodable)):
            content("data:image/png;base64," + sign * 20_000_000, image_max_bytes=1_000_000)


def test_data_url_size_is_checked_before_decoding():
    url = f"data:image/png;base64,{base64.b64encode(bytes(301)).decode()}"
    with pytest.raises(MediaTooLarge) as caught:
        find(url, image_max_bytes=300)
    assert caught.value.param == PART
    assert len(content(url, image_max_bytes=301)) == 301
    find(url, kind="video", image_max_bytes=300)


def test_line_breaks_and_escapes_do_not_count_toward_size():
    lines = base64.encodebytes(b"\xff" * 300).decode()
    assert len(content(f"data:;base64,{lines}", image_max_bytes=300)) == 300
    assert len(content(f"data:;base64,{lines.replace('/', '%2F')}", image_max_bytes=300)) == 300


@cases("scheme", ["ftp", "gopher", "javascript", "blob", "content", "c", "s3", "http+unix"])
def test_other_schemes_are_rejected(scheme):
    with pytest.raises(MediaRefused):
        find(f"{scheme}://good.example/a.png")


def test_http_url_is_remote():
    assert isinstance(find("HTTPS://good.example/a.png"), RemoteSource)


@pytest.fixture
def folder(tmp_path):
    """Create `open/`, which may be read, and `secret.png` next to it."""
    (tmp_path / "open" / "sub").mkdir(parents=True)
    (tmp_path / "open" / "a b.png").write_bytes(DATA)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "open-not" / "x.png").parent.mkdir()
    (tmp_path / "open-not" / "x.png").write_bytes(b"secret")
    return tmp_path / "open"


@cases("text", ["file:///etc/passwd", "/etc/passwd", "etc/passwd", "a.png", "", "file:a.png", ENCODED])
def test_files_are_rejected_by_default(text):
    with pytest.raises(MediaRefused) as caught:
        find(text)
    assert caught.value.param == PART
    assert "passwd" not in caught.value.message


def test_file_under_allowed_folder_is_read(folder):
    for text in (f"file://{folder}/a%20b.png", f"file://localhost{folder}/a b.png", f"{folder}/a b.png", "a b.png"):
        assert content(text, allowed_local_media_path=folder) == DATA


def test_only_links_inside_allowed_folder_are_followed(folder):
    (folder / "within.png").symlink_to(folder / "a b.png")
    (folder / "out.png").symlink_to(folder.parent / "secret.png")
    (folder / "sub" / "up").symlink_to(folder.parent)
    (folder / "loop").symlink_to(folder / "loop")
    assert content("within.png", allowed_local_media_path=folder) == DATA
    for text in ("out.png", "sub/up/secret.png", f"file://{folder}/out.png"):
        with pytest.raises(MediaRefused):
            find(text, allowed_local_media_path=folder)
    with pytest.raises((MediaRefused, MediaUnreachable)):
        content("loop", allowed_local_media_path=folder)


def test_allowed_folder_may_be_a_link(folder):
    alias = folder.parent / "alias"
    alias.symlink_to(folder)
    assert content("a b.png", allowed_local_media_path=alias) == DATA


@pytest.mark.parametrize(
    "text",
    [
        "../secret.png",
        "sub/../../secret.png",
        "file://{0}/../secret.png",
        "file://{0}/%2e%2e/secret.png",
        "{0}-not/x.png",
        "/etc/passwd",
        "file://evil.example{0}/a b.png",
        "file://{0}/a b.png?x",
        "a\x00b",
        "~/x",
    ],
)
def test_paths_outside_allowed_folder_are_rejected(folder, text):
    with pytest.raises((MediaRefused, MediaUnreachable)) as caught:
        content(text.format(folder), allowed_local_media_path=folder)
    assert str(folder) not in caught.value.message


def test_link_replacing_a_checked_file_is_not_followed(folder):
    source = find("a b.png", allowed_local_media_path=folder)
    (folder / "a b.png").unlink()
    (folder / "a b.png").symlink_to(folder.parent / "secret.png")
    with pytest.raises(MediaUnreachable):
        read(source)


def test_security_38_folder_replaced_after_the_check_is_not_followed(folder):
    outside = folder.parent / "outside"
    for base in (folder, outside):
        (base / "inner").mkdir(parents=True)
        (base / "inner" / "image.png").write_bytes(DATA)
    (folder / "alias").symlink_to("inner")
    assert content("alias/image.png", allowed_local_media_path=folder) == DATA
    source = find("inner/image.png", allowed_local_media_path=folder)
    assert read(source) == DATA
    (folder / "inner").rename(folder / "renamed")
    (folder / "inner").symlink_to(outside / "inner")
    with pytest.raises(MediaUnreachable):
        read(source)


def test_non_regular_file_is_unreachable(folder):
    os.mkfifo(folder / "pipe")
    for text in ("missing.png", "sub", "pipe", "."):
        with pytest.raises(MediaUnreachable) as caught:
            content(text, allowed_local_media_path=folder)
        assert caught.value.param == PART


def test_file_above_limit_is_too_large(folder):
    with pytest.raises(MediaTooLarge):
        content("a b.png", allowed_local_media_path=folder, image_max_bytes=255)
    assert isinstance(find("a b.png", allowed_local_media_path=folder), LocalSource)
