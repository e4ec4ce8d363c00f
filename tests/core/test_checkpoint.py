from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.models.checkpoint import find_model
from dashinfer_vlm_core.models.model_card import read_generation_config
from tests.hub import environment, serve_hub
from tests.waiting import HANG

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


@pytest.fixture
def hub(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "served")
    (folder / "pickle.bin").write_bytes(b"not wanted")
    with serve_hub(folder) as handler:
        yield handler


def find(name, home, endpoint):
    """Find the checkpoint in a separate process: the hub's client reads its endpoint when it is imported."""
    command = [sys.executable, "-c", FIND, name]
    variables = environment(home, endpoint)
    return subprocess.run(command, capture_output=True, text=True, env=variables, check=False, timeout=HANG)


def test_registered_name_comes_first(tmp_path):
    assert find_model("demo", registered={"demo": tmp_path}) == tmp_path


def test_folder_is_used_as_is(tmp_path):
    assert find_model(str(tmp_path), registered={}) == tmp_path


@pytest.mark.parametrize("name", ["nothing", "", "a/b/c", "../x y", "~no-user/x"])
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
    endpoint = hub.url
    first = find("maker/tiny", tmp_path, endpoint)
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == (tiny_checkpoint / "model.safetensors").read_bytes()
    assert not (folder / "pickle.bin").exists()
    assert first.stderr.startswith("Downloading maker/tiny ...\n")
    assert "Fetching" not in first.stderr  # the hub's own bar

    asked = list(hub.asked)
    again = find("maker/tiny", tmp_path, endpoint)
    assert Path(again.stdout.strip()) == folder
    assert [line for line in hub.asked[len(asked) :] if line.startswith("GET /maker")] == []

    assert Path(find("maker/tiny", tmp_path, "http://127.0.0.1:9").stdout.strip()) == folder


@pytest.mark.slow
def test_broken_connection_is_explained(hub, tmp_path):
    endpoint = hub.url
    hub.mute = True
    broken = find("maker/tiny", tmp_path, endpoint)
    assert broken.returncode == 1
    assert broken.stderr.startswith(
        "The connection to the Hugging Face Hub was lost while 'maker/tiny' was being downloaded ("
    )
    assert broken.stderr.endswith("Try again to resume the download.\n")
    hub.mute = False
    assert find("maker/tiny", tmp_path, endpoint).returncode == 0


@pytest.mark.slow
def test_missing_repository_is_explained(hub, tmp_path):
    result = find("maker/none", tmp_path, hub.url)
    assert result.returncode == 1
    assert "The Hugging Face Hub has no model 'maker/none', or it is private" in result.stderr


@pytest.mark.slow
def test_unreachable_hub_is_explained(tmp_path):
    result = find("maker/tiny", tmp_path, "http://127.0.0.1:9")
    assert result.returncode == 1
    assert "The Hugging Face Hub cannot be reached and 'maker/tiny' is not in the cache" in result.stderr
    assert "try `dashinfer-vlm pull --hub modelscope maker/tiny`." in result.stderr
