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
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert str(folder) in ended.stderr.splitlines()[-1]
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.slow
def test_a_full_disk_is_named_where_a_download_ends_there(tmp_path):
    """A limit on the size of files stands for a disk that is full; a server on loopback for the hub."""
    from tests.web import body, serve

    commit = "0" * 40
    weights = os.urandom(200_000)
    head = [f"X-Repo-Commit: {commit}", 'ETag: "abc"']
    listing = b'{"id": "maker/tiny", "sha": "%s", "siblings": [{"rfilename": "model.safetensors"}]}' % commit.encode()
    answers = {
        "/api/models/maker/tiny/revision/main": body(listing, *head),
        f"/maker/tiny/resolve/{commit}/model.safetensors": body(weights, *head),
    }
    with serve(answers) as web:
        environment = {**os.environ, "HF_ENDPOINT": web.url(""), "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1",
                       "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}  # fmt: skip
        ended = subprocess.run(
            [sys.executable, "-c", MAIN, "serve", "--port", "0", "--model", "maker/tiny"],
            env=environment, capture_output=True, text=True, timeout=110, check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Downloading 'maker/tiny' failed" in ended.stderr.splitlines()[-1]


def test_write_checkpoint_makes_what_is_damaged_here(tmp_path):
    names = {name for name, _ in DAMAGES.values()}
    assert names <= {path.name for path in write_checkpoint(tmp_path / "model").iterdir()}
