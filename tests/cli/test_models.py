"""`models`: registered and downloaded models, and those in folders."""

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
    """A huggingface-hub cache with a supported model and an unsupported one."""

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
def list_models(hub):
    """Return the rows of `models --json` by name. It runs in a subprocess: huggingface-hub reads its options once."""

    def list_models(*args):
        command = [sys.executable, "-c", MAIN, "models", "--json", *map(str, args)]
        environment = {**os.environ, "HF_HUB_CACHE": str(hub)}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG, check=True)
        return {row["name"]: row for row in json.loads(result.stdout)}

    return list_models


@pytest.mark.slow
def test_registered_and_downloaded_models_are_listed(list_models, tiny_checkpoint):
    rows = list_models()
    assert set(rows) == {"demo", "maker/tiny"}
    assert (rows["demo"]["origin"], rows["demo"]["dtype"], rows["demo"]["context"]) == ("registered", "bfloat16", 4096)
    assert rows["demo"]["bytes"] == sum(path.stat().st_size for path in CHECKPOINT.iterdir())
    tiny = rows["maker/tiny"]
    assert (tiny["origin"], tiny["dtype"], tiny["context"], tiny["problem"]) == ("downloaded", "float32", 2048, "")
    assert tiny["bytes"] == sum(path.stat().st_size for path in tiny_checkpoint.iterdir())


@pytest.mark.slow
def test_all_and_folder_options_list_more(list_models, tmp_path, tiny_checkpoint):
    rows = list_models("--all", "--folder", tiny_checkpoint.parent)
    assert rows["maker/other"]["problem"] == "No model family is named 'bert'"
    assert rows[str(tiny_checkpoint)]["origin"] == "folder"


@pytest.mark.slow
def test_incomplete_download_is_listed_with_next_step(list_models, hub):
    next(hub.rglob("model.safetensors")).unlink()
    assert list_models()["maker/tiny"]["problem"] == "incomplete; run: dashinfer-vlm pull maker/tiny"


def test_list_is_another_name(run):
    assert run("list").stdout == run("models").stdout


def test_table_has_header_and_rows(run):
    lines = run("models").stdout.splitlines()
    assert lines[0].split() == ["MODEL", "SOURCE", "SIZE", "DTYPE", "CONTEXT", "PROBLEM"]
    assert any(line.split()[:2] == ["demo", "registered"] for line in lines)
