"""Rule 29: code in the cache folder. DashInfer's environment is a shell script here."""

from __future__ import annotations

import json
import os
import sys

import pytest

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import SetupError
from dashinfer_vlm_dashinfer import convert
from dashinfer_vlm_dashinfer.checks import check
from dashinfer_vlm_dashinfer.convert import ConvertedModel
from dashinfer_vlm_dashinfer.environment import (
    examine,
    find_environment,
    private_environment,
    private_folder,
)
from dashinfer_vlm_dashinfer.install import install

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")

STRANGER = 54321
"""A user id other than ours and root's."""


@pytest.fixture
def installed(tmp_path):
    """A cache with an environment of DashInfer whose interpreter records that it was executed."""
    config = EngineConfig(cache_dir=tmp_path)
    folder = private_folder(config)
    environment = private_environment(folder)
    python = environment.python
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\ntouch '{tmp_path / 'executed'}'\necho '{{\"version\": \"2\"}}'\n")
    python.chmod(0o755)
    (folder / "environment.json").write_text("{}")
    (python.parent / "python3").symlink_to("python")
    environment.stubs.mkdir()
    return config


def assert_not_executed(config, reason):
    with pytest.raises(SetupError, match=f"{reason}. Delete the folder and run") as error:
        examine(find_environment(config))
    assert next(check(config)).status == "unusable"
    assert str(config.cache_dir) not in error.value.message
    with pytest.raises(SetupError, match=f"{reason}. Delete the folder and run"):
        install(config, python=None, cpu=True, report=print)
    assert not (config.cache_dir / "executed").exists()


needs_other_python = pytest.mark.skipif(
    sys.version_info[:2] == (3, 10), reason="this interpreter may serve DashInfer itself"
)


@needs_other_python
def test_security_29_private_dashinfer_environment_is_used(installed):
    assert examine(find_environment(installed)).version == "2"
    private_folder(installed).chmod(0o700)
    private_environment(private_folder(installed)).python.chmod(0o775)
    assert examine(find_environment(installed)).version == "2"


@needs_other_python
@pytest.mark.parametrize("path", [".", "env", "env/bin/python", "env/cpu-only"])
def test_security_29_dashinfer_environment_writable_by_others_is_not_executed(installed, path):
    exposed = private_folder(installed) / path
    exposed.chmod(exposed.stat().st_mode | 0o020)
    assert_not_executed(installed, "other users can write to it")


@needs_other_python
@as_root
def test_security_29_dashinfer_environment_of_another_user_is_not_executed(installed):
    os.chown(private_folder(installed) / "env" / "bin" / "python", STRANGER, STRANGER)
    assert_not_executed(installed, "it belongs to another user")


def test_security_29_converted_model_in_folder_writable_by_others_is_not_used(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    files = ConvertedModel.at(folder)
    files.graph.write_bytes(b"graph")
    files.weights.write_bytes(b"weights")
    (folder / convert.MANIFEST).write_text(json.dumps(convert._checksums(folder)))
    assert convert._is_usable(folder)
    folder.chmod(0o775)
    assert not convert._is_usable(folder)
