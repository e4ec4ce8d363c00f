from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.models.checkpoint import find_model
from dashinfer_vlm_core.models.model_card import read_generation_config
from tests.waiting import HANG

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FIND = """
import logging, sys
from dashinfer_vlm_core.models.checkpoint import find_model
from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.progress import Progress
logging.basicConfig(format="%(message)s")
logging.getLogger("dashinfer_vlm_core").setLevel("INFO")
try:
    print(find_model(sys.argv[1], registered={}))
    assert not Progress._open
except CheckpointError as error:
    sys.exit(error.message)
"""


class Hub(BaseHTTPRequestHandler):
    """The endpoints that the hub's client uses, for one repository with the files in `folder`."""

    folder: Path
    asked: list[str]
    mute = False

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.asked.append(f"{self.command} {self.path}")
        if self.mute:
            self.close_connection = True
        elif self.path.startswith("/api/models/maker/tiny/tree/"):
            self._send(json.dumps([self.entry(path) for path in sorted(self.folder.iterdir())]).encode())
        elif self.path.startswith("/api/models/maker/tiny/"):
            files = [{"rfilename": path.name} for path in sorted(self.folder.iterdir())]
            self._send(json.dumps({"id": "maker/tiny", "sha": COMMIT, "siblings": files}).encode())
        elif self.path.startswith(f"/maker/tiny/resolve/{COMMIT}/"):
            self._send((self.folder / self.path.rpartition("/")[2]).read_bytes())
        else:
            self.send_response(401 if "private" in self.path else 404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

    def entry(self, path):
        return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": path.name}

    def _send(self, body):
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        """Keep the test's output clean."""


@pytest.fixture
def hub(tiny_checkpoint, tmp_path):
    handler = type("Handler", (Hub,), {"folder": tiny_checkpoint, "asked": []})
    (tiny_checkpoint / "pickle.bin").write_bytes(b"not wanted")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
    (tiny_checkpoint / "pickle.bin").unlink()


def find(name, home, endpoint):
    """Find the checkpoint in a separate process: the hub's client reads its endpoint when it is imported."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",  # where both are set, the lowercase names take precedence
    }
    return subprocess.run(
        [sys.executable, "-c", FIND, name], capture_output=True, text=True, env=environment, check=False, timeout=HANG
    )


def test_registered_name_comes_first(tmp_path):
    assert find_model("demo", registered={"demo": tmp_path}) == tmp_path


def test_folder_is_used_as_is(tmp_path):
    assert find_model(str(tmp_path), registered={}) == tmp_path


@pytest.mark.parametrize("name", ["nothing", "", "a/b/c", "../x y"])
def test_unknown_model_value_is_explained(name):
    with pytest.raises(CheckpointError, match=r"known: demo\), a folder, or a Hugging Face model ID such as") as caught:
        find_model(name, registered={"demo": Path()})
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("content", "sampling"),
    [
        (None, {}),
        ({"eos_token_id": 1}, {}),
        ({"do_sample": False, "top_p": 0.8}, {"temperature": 0}),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        ),
        ({"repetition_penalty": 1.05, "temperature": "hot"}, {"repetition_penalty": 1.05}),
    ],
)
def test_sampling_parameters_are_read_from_generation_config(tmp_path, content, sampling):
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert read_generation_config(tmp_path) == sampling


def test_model_that_is_a_file_is_explained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    for name in ("qwen.gguf", "models/qwen.gguf"):  # the second looks like a Hugging Face model ID
        Path(name).touch()
        with pytest.raises(
            CheckpointError, match=f"'{name}' is a file. Set `model` to a folder .* GGUF files are not read"
        ):
            find_model(name, registered={})


@pytest.mark.slow
def test_hub_id_is_downloaded_once_then_found_offline(hub, tmp_path, tiny_checkpoint):
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    first = find("maker/tiny", tmp_path, endpoint)
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == (tiny_checkpoint / "model.safetensors").read_bytes()
    assert not (folder / "pickle.bin").exists()
    assert first.stderr.startswith("Downloading maker/tiny ...\n")
    assert "Fetching" not in first.stderr  # the hub's own bar

    asked = list(hub.RequestHandlerClass.asked)
    again = find("maker/tiny", tmp_path, endpoint)
    assert Path(again.stdout.strip()) == folder
    assert [line for line in hub.RequestHandlerClass.asked[len(asked) :] if line.startswith("GET /maker")] == []

    hub.shutdown()
    hub.server_close()
    assert Path(find("maker/tiny", tmp_path, endpoint).stdout.strip()) == folder


@pytest.mark.slow
def test_broken_connection_is_explained(hub, tmp_path):
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    hub.RequestHandlerClass.mute = True
    broken = find("maker/tiny", tmp_path, endpoint)
    assert broken.returncode == 1
    assert broken.stderr.startswith(
        "The connection to the Hugging Face Hub was lost while 'maker/tiny' was being downloaded ("
    )
    assert broken.stderr.endswith("Try again to resume the download.\n")
    hub.RequestHandlerClass.mute = False
    assert find("maker/tiny", tmp_path, endpoint).returncode == 0


@pytest.mark.slow
def test_missing_repository_is_explained(hub, tmp_path):
    result = find("maker/none", tmp_path, f"http://127.0.0.1:{hub.server_port}")
    assert result.returncode == 1
    assert "The Hugging Face Hub has no model 'maker/none', or it is private" in result.stderr


@pytest.mark.slow
def test_unreachable_hub_is_explained(tmp_path):
    result = find("maker/tiny", tmp_path, "http://127.0.0.1:9")
    assert result.returncode == 1
    assert "The Hugging Face Hub cannot be reached and 'maker/tiny' is not in the cache" in result.stderr
