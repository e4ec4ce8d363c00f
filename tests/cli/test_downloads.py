"""Downloads while other processes change the cache, links to files of the user, and lists with several pages."""

from __future__ import annotations

import fcntl

import pytest

from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.models.checkpoint import fetch_files, list_snapshot
from tests.hub import COMMIT, serve_hub

WEIGHTS = "model.safetensors"


def is_killed(partial, blob, content):
    partial.write_bytes(content[:1000])


def writes_too_much(partial, blob, content):
    partial.write_bytes(content + b"x")


def finishes(partial, blob, content):
    partial.write_bytes(content)
    partial.replace(blob)


def deletes_damaged_file(partial, blob, content):
    partial.unlink()


@pytest.mark.parametrize(
    ("other_process", "ranges"),
    [(is_killed, ["bytes=1000-"]), (writes_too_much, [""]), (finishes, []), (deletes_damaged_file, [""])],
)
def test_file_that_other_process_had_locked_is_completed(hub, repository, monkeypatch, *, other_process, ranges):
    snapshot = list_snapshot("maker/tiny")
    (weights,) = [file for file in snapshot.files if file.path == WEIGHTS]
    blob = snapshot.blob(weights)
    content = (hub.folder / WEIGHTS).read_bytes()
    before = [other_process]
    flock = fcntl.flock

    def wait_for_lock(stream, operation):
        while before:  # the other process does this while it holds the lock
            before.pop()(snapshot.partial(weights), blob, content)
        flock(stream, operation)

    monkeypatch.setattr(fcntl, "flock", wait_for_lock)
    hub.asked.clear()
    fetch_files(snapshot, [weights])
    assert [line.partition(WEIGHTS)[2].strip() for line in hub.asked] == ranges
    assert list((repository / "blobs").iterdir()) == [blob]
    assert blob.read_bytes() == content


@pytest.mark.parametrize("is_blob", [False, True])
def test_damaged_link_is_replaced_without_its_target(run, hub, repository, tmp_path, is_blob):
    run("pull", "maker/tiny")
    file = repository / "snapshots" / COMMIT / WEIGHTS
    link = file.resolve() if is_blob else file
    link.unlink()
    own = tmp_path / "own.safetensors"
    own.write_bytes(b"of the user")
    link.symlink_to(own)
    assert f"Damaged, and downloaded again: {WEIGHTS}" in run("pull", "maker/tiny").stderr
    assert own.read_bytes() == b"of the user"
    assert file.read_bytes() == (hub.folder / WEIGHTS).read_bytes()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_token_is_not_sent_to_pages_at_other_ports_or_schemes(hub, monkeypatch, scheme):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serve_hub(hub.folder) as other:
        hub.next_page = f"{other.url}/api" if scheme == "http" else hub.url.replace("http:", "https:")
        with pytest.raises(CheckpointError, match="has another host, port or scheme"):
            list_snapshot("maker/tiny")
        assert other.asked == []


def test_endless_pages_are_stopped(hub, monkeypatch):
    monkeypatch.setattr("dashinfer_vlm_core.models.hub.MAX_PAGES", 3)
    hub.entries |= dict.fromkeys((path.name for path in hub.folder.iterdir()), None)
    hub.next_page = f"{hub.url}/api/models/maker/tiny/tree/again"
    with pytest.raises(CheckpointError, match="more than 3 pages of files for 'maker/tiny'"):
        list_snapshot("maker/tiny")
    assert len(hub.asked) == 4  # one for the commit
