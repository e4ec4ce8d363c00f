"""Unusable folders: a message with the folder and the next step, no traceback, exit code 2."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import SetupError
from tests.forked import forked
from tests.server.test_serve import MAIN
from tests.tiny import write_checkpoint
from tests.waiting import HANG
from tests.web import body, serve


@pytest.fixture
def model(tiny_checkpoint, tmp_path):
    """A copy of a checkpoint for a test to damage."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "model")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def corrupt(path):
    path.write_bytes(b"\x00garbage")


DAMAGES = {
    "no configuration": ("config.json", os.unlink),
    "a configuration that is not JSON": ("config.json", corrupt),
    "no weights": ("model.safetensors", os.unlink),
    "truncated weights": ("model.safetensors", truncate),
    "corrupt weights": ("model.safetensors", corrupt),
    "empty weights": ("model.safetensors", lambda path: path.write_bytes(b"")),
    "no tokenizer": ("tokenizer.json", os.unlink),
    "a corrupt tokenizer": ("tokenizer.json", corrupt),
    "no preprocessor configuration": ("preprocessor_config.json", os.unlink),
    "a corrupt preprocessor configuration": ("preprocessor_config.json", corrupt),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_model_folder_is_named(model, name, damage):
    damage(model / name)
    with pytest.raises(SetupError) as caught:
        Engine(EngineConfig(model=str(model), decoder="torch")).start()
    assert str(model) in caught.value.message, caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.slow
@pytest.mark.parametrize("where", ["file", "/proc/self/none", "/dev/null/none"])
def test_unwritable_cache_folder_is_named(tmp_path, where):
    """The folder for DashInfer's environment. root can write anywhere, so a file and devices replace the folder."""
    folder = tmp_path / where
    (tmp_path / "file").write_text("precious")
    command = [*forked(), "-c", MAIN, "dashinfer", "install", "--cpu", "--cache-dir", str(folder)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert completed.returncode == 2, completed.stderr
    assert "Traceback" not in completed.stderr
    assert str(folder) in completed.stderr.splitlines()[-1]
    assert (tmp_path / "file").read_text() == "precious"


COMMIT = "0" * 40
HEAD = (f"X-Repo-Commit: {COMMIT}", 'ETag: "abc"', "Connection: close")
HUB = {
    "/api/models/maker/tiny/revision/main": body(
        b'{"id": "maker/tiny", "sha": "%s", "siblings": [{"rfilename": "model.safetensors"}]}' % COMMIT.encode(), *HEAD
    ),
    f"/api/models/maker/tiny/tree/{COMMIT}?recursive=true&expand=false": body(
        b'[{"type": "file", "oid": "%s", "size": 200000, "path": "model.safetensors"}]' % COMMIT.encode(),
        *HEAD,
    ),
    f"/maker/tiny/resolve/{COMMIT}/model.safetensors": body(bytes(200_000), *HEAD),
}
"""The requests to a hub for a model of one file."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "limit", "words"),
    [("cache", 100_000, "File too large"), ("/dev/null/cache", resource.RLIM_INFINITY, "Not a directory")],
    ids=["a full disk", "an unwritable cache"],
)
def test_download_to_a_full_disk_reports_it(tmp_path, cache, limit, words):
    """A file size limit simulates a full disk, and a server on loopback the hub."""
    with serve(HUB) as web:
        variables = {"HF_ENDPOINT": web.url(""), "HF_HOME": str(tmp_path / cache), "HF_HUB_DISABLE_XET": "1"}
        completed = subprocess.run(
            [sys.executable, "-c", MAIN, "serve", "--port", "0", "--model", "maker/tiny"],
            env={**os.environ, **variables, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )
    line = completed.stderr.splitlines()[-1]
    assert completed.returncode == 2, completed.stderr
    assert "Traceback" not in completed.stderr
    assert line.startswith(f"dashinfer-vlm: Downloading 'maker/tiny' failed: {words}. Check that")
    assert str(tmp_path / cache) in line


def test_write_checkpoint_writes_all_damaged_files(tmp_path):
    names = {name for name, _ in DAMAGES.values()}
    assert names <= {path.name for path in write_checkpoint(tmp_path / "model").iterdir()}
