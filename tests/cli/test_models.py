"""`models`: what is registered, downloaded, and in folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dashinfer_vlm_demo import CHECKPOINT
from tests.cli.conftest import MAIN
from tests.waiting import HANG


@pytest.fixture
def hub(tmp_path, tiny_checkpoint):
    """A hub's cache as huggingface-hub lays it, with a model of ours and one of another kind."""

    def add(name, folder, files):
        commit = "0123456789abcdef0123456789abcdef01234567"
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (repository / "blobs").mkdir()
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
        for file in files:
            blob = repository / "blobs" / file
            blob.write_bytes((folder / file).read_bytes())
            (snapshot / file).symlink_to(os.path.relpath(blob, snapshot))

    add("maker/tiny", tiny_checkpoint, [path.name for path in tiny_checkpoint.iterdir()])
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "bert"}')
    add("maker/other", other, ["config.json"])
    return tmp_path / "hub"


@pytest.fixture
def listed(hub):
    """The rows of `models --json`, by name: in a process of its own, for huggingface-hub reads its options once."""

    def listed(*words):
        command = [sys.executable, "-c", MAIN, "models", "--json", *map(str, words)]
        environment = {**os.environ, "HF_HUB_CACHE": str(hub)}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG, check=True)
        return {row["name"]: row for row in json.loads(ended.stdout)}

    return listed


@pytest.mark.slow
def test_what_is_here_is_listed(listed, tiny_checkpoint):
    rows = listed()
    assert set(rows) == {"demo", "maker/tiny"}
    assert (rows["demo"]["origin"], rows["demo"]["dtype"], rows["demo"]["context"]) == ("registered", "bfloat16", 4096)
    assert rows["demo"]["bytes"] == sum(path.stat().st_size for path in CHECKPOINT.iterdir())
    tiny = rows["maker/tiny"]
    assert (tiny["origin"], tiny["dtype"], tiny["context"], tiny["problem"]) == ("downloaded", "float32", 2048, "")
    assert tiny["bytes"] == sum(path.stat().st_size for path in tiny_checkpoint.iterdir())


@pytest.mark.slow
def test_others_and_folders_are_listed_when_asked_for(listed, tmp_path, tiny_checkpoint):
    rows = listed("--all", "--folder", tiny_checkpoint.parent)
    assert rows["maker/other"]["problem"] == "No model family is called 'bert'"
    assert rows[str(tiny_checkpoint)]["origin"] == "folder"


def test_the_table_for_people(run):
    lines = run("models").stdout.splitlines()
    assert lines[0].split() == ["MODEL", "FROM", "SIZE", "NUMBERS", "CONTEXT", "PROBLEM"]
    assert any(line.split()[:2] == ["demo", "registered"] for line in lines)
