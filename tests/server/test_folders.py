"""Folders that cannot be used, with real ones: a message that says which and what to do, no traceback, exit code 2."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import SetupError
from tests.server.test_serve import MAIN, refusal
from tests.tiny import write_checkpoint
from tests.waiting import HANG
from tests.web import body, serve


@pytest.fixture
def model(tiny_checkpoint, tmp_path):
    """A checkpoint that a test may damage."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "model")


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def garbage(path):
    path.write_bytes(b"\x00garbage")


DAMAGES = {
    "no configuration": ("config.json", os.unlink),
    "a configuration that is no JSON": ("config.json", garbage),
    "no weights": ("model.safetensors", os.unlink),
    "weights that were cut off": ("model.safetensors", cut),
    "weights that are none": ("model.safetensors", garbage),
    "weights that are empty": ("model.safetensors", lambda path: path.write_bytes(b"")),
    "no tokenizer": ("tokenizer.json", os.unlink),
    "a tokenizer that is none": ("tokenizer.json", garbage),
    "no sizes of pictures": ("preprocessor_config.json", os.unlink),
    "sizes of pictures that are none": ("preprocessor_config.json", garbage),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_model_folder_is_named(model, name, damage):
    damage(model / name)
    with pytest.raises(SetupError) as caught:
        Engine(EngineConfig(model=str(model), decoder="torch")).start()
    assert str(model) in caught.value.message, caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.slow
def test_a_damaged_model_folder_ends_the_server_with_words(model):
    cut(model / "model.safetensors")
    line, code = refusal("--port", 0, "--model", model)
    assert code == 2
    assert str(model) in line


@pytest.mark.slow
@pytest.mark.parametrize("where", ["file", "/proc/self/none", "/dev/null/none"])
def test_a_cache_folder_that_cannot_be_written_to_is_named(tmp_path, where):
    """Where DashInfer's environment would be put; root may write anywhere, so that a file and devices stand in."""
    folder = tmp_path / where
    (tmp_path / "file").write_text("precious")
    command = [sys.executable, "-c", MAIN, "dashinfer", "install", "--cpu", "--cache-dir", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert str(folder) in ended.stderr.splitlines()[-1]
    assert (tmp_path / "file").read_text() == "precious"


COMMIT = "0" * 40
HEAD = (f"X-Repo-Commit: {COMMIT}", 'ETag: "abc"', "Connection: close")
HUB = {
    "/api/models/maker/tiny/revision/main": body(
        b'{"id": "maker/tiny", "sha": "%s", "siblings": [{"rfilename": "model.safetensors"}]}' % COMMIT.encode(), *HEAD
    ),
    f"/api/models/maker/tiny/tree/{COMMIT}?recursive=true&expand=false": body(
        b'[{"type": "file", "oid": "a", "size": 200000, "path": "model.safetensors"}]', *HEAD
    ),
    f"/maker/tiny/resolve/{COMMIT}/model.safetensors": body(bytes(200_000), *HEAD),
}
"""What is asked of a hub for a model of one file."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "room", "words"),
    [("cache", 100_000, "File too large"), ("/dev/null/cache", resource.RLIM_INFINITY, "Not a directory")],
    ids=["a full disk", "a cache that cannot be written to"],
)
def test_a_download_that_finds_no_room_says_so(tmp_path, cache, room, words):
    """A limit on the size of files stands for a disk that is full; a server on loopback for the hub."""
    with serve(HUB) as web:
        variables = {"HF_ENDPOINT": web.url(""), "HF_HOME": str(tmp_path / cache), "HF_HUB_DISABLE_XET": "1"}
        ended = subprocess.run(
            [sys.executable, "-c", MAIN, "serve", "--port", "0", "--model", "maker/tiny"],
            env={**os.environ, **variables, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
        )
    line = ended.stderr.splitlines()[-1]
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert line.startswith(f"dashinfer-vlm: Downloading 'maker/tiny' failed: {words}. See whether")


def test_write_checkpoint_makes_what_is_damaged_here(tmp_path):
    names = {name for name, _ in DAMAGES.values()}
    assert names <= {path.name for path in write_checkpoint(tmp_path / "model").iterdir()}
