"""The kit for a machine without a network: making and unpacking it, with small files in place of DashInfer's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import SetupError
from dashinfer_vlm_dashinfer.commands import dashinfer
from dashinfer_vlm_dashinfer.environment import (
    private_environment,
    private_folder,
)
from dashinfer_vlm_dashinfer.install import _candidates, install, is_suitable
from dashinfer_vlm_dashinfer.kit import SUMS, unpack_kit
from tests.scripts import load_script

PIECE_BYTES = 4096


@pytest.fixture(scope="module")
def script():
    return load_script("make_dashinfer_kit")


def write_python(python, *, mode=0o755):
    """Write an interpreter that behaves like one with DashInfer."""
    python.parent.mkdir(parents=True)
    findings = {"python": "3.10.13", "version": "2.1.0"}
    python.write_text(f"#!/bin/sh\necho '{json.dumps(findings)}'\n")
    python.chmod(mode)


@pytest.fixture
def kit(script, tmp_path):
    """Make a kit of an interpreter like that, a link and a large file."""
    environment = tmp_path / "made" / "env"
    write_python(environment / "bin" / "python3.10", mode=0o777)
    (environment / "bin" / "python").symlink_to("python3.10")
    (environment / "extension").write_bytes(os.urandom(3 * PIECE_BYTES))
    folder = tmp_path / "kit"
    folder.mkdir()
    pieces = script.write_pieces(environment, folder, PIECE_BYTES)
    (folder / SUMS).write_text("".join(f"{script.sha256(piece)}  {piece.name}\n" for piece in pieces))
    return folder


def test_pieces_are_limited_and_unpacked_as_before(kit, tmp_path):
    sizes = [piece.stat().st_size for piece in sorted(kit.glob("dashinfer-kit.*"))]
    assert len(sizes) > 3
    assert set(sizes[:-1]) == {PIECE_BYTES}
    assert sizes[-1] <= PIECE_BYTES
    made, found = tmp_path / "made" / "env", tmp_path / "unpacked" / "env"
    unpack_kit(kit, tmp_path / "unpacked")
    assert (found / "extension").read_bytes() == (made / "extension").read_bytes()
    assert (found / "bin" / "python").readlink() == Path("python3.10")
    assert (found / "bin" / "python3.10").stat().st_mode & 0o777 == 0o755
    assert len(list(found.rglob("*"))) == len(list(made.rglob("*")))


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_damaged_piece_is_named_before_anything_changes(kit, tmp_path, damage):
    piece = kit / "dashinfer-kit.01"
    if damage == "missing":
        piece.unlink()
    else:
        content = bytearray(piece.read_bytes())
        content[-1] ^= 1
        piece.write_bytes(content)
    existing = tmp_path / "env"
    existing.mkdir()
    with pytest.raises(SetupError, match=r"dashinfer-kit\.01 is missing or damaged\. Copy it again\."):
        unpack_kit(kit, tmp_path)
    assert existing.is_dir()


def test_other_folders_are_rejected(tmp_path):
    with pytest.raises(SetupError, match="is not a kit: SHA256SUMS cannot be read"):
        unpack_kit(tmp_path, tmp_path / "unpacked")


@pytest.mark.parametrize("cpu_only", [None, True, False], ids=["nothing", "cpu only", "full"])
def test_kit_replaces_all_but_full_environment(kit, tmp_path, cpu_only):
    config = EngineConfig(cache_dir=tmp_path / "cache")
    folder = private_folder(config)
    environment = private_environment(folder)
    if cpu_only is not None:
        write_python(environment.python)
        (folder / "environment.json").write_text("{}")
        (folder / "env" / "old").touch()
    if cpu_only:
        environment.stubs.mkdir()
        (environment.stubs / "libcudart.so.12").touch()
    lines = []
    install(config, python=None, cpu=False, kit=kit, report=lines.append)
    assert not environment.cpu_only
    assert (folder / "env" / "old").exists() == (cpu_only is False)
    assert (folder / "env" / "extension").exists() == (cpu_only is not False)
    expected = "DashInfer is already installed." if cpu_only is False else f"Unpacking {kit} into {folder}."
    assert lines == [expected]


def test_command_unpacks_kit_and_rejects_other_options(kit, tmp_path):
    arguments = ["install", "--kit", str(kit), "--cache-dir", str(tmp_path / "cache")]
    done = CliRunner().invoke(dashinfer, arguments)
    assert done.exit_code == 0, done.output
    assert "2.1.0 under Python 3.10.13, full" in done.output
    done = CliRunner().invoke(dashinfer, [*arguments, "--cpu"])
    assert (done.exit_code, "remove `--python` and `--cpu`" in done.output) == (2, True)


@pytest.fixture(scope="module")
def python():
    """Return a CPython 3.10 with a shared library."""
    for found in filter(is_suitable, _candidates(None)):
        library = "import sysconfig; print(sysconfig.get_config_var('LIBDIR') + '/libpython3.10.so.1.0')"
        done = subprocess.run([found, "-I", "-c", library], capture_output=True, text=True, check=True)
        if Path(done.stdout.strip()).is_file():
            return found
    pytest.skip("There is no CPython 3.10 with a shared library.")


@pytest.mark.slow
def test_copied_interpreter_runs_in_another_folder(script, python, tmp_path):
    script.copy_python(python, tmp_path / "env")
    (tmp_path / "env").rename(tmp_path / "moved")
    program = (
        "import contextvars, ctypes, queue, sys, zlib; print(sys.prefix, open('/proc/self/maps').read(), sep='\\n')"
    )
    command = [tmp_path / "moved" / "bin" / "python", "-I", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    prefix, *maps = done.stdout.splitlines()
    assert Path(prefix) == tmp_path / "moved"
    files = {line.split()[-1] for line in maps if "/" in line}
    ours = {Path(file).name for file in files if file.startswith(str(tmp_path / "moved"))}
    assert {"libpython3.10.so.1.0", "libffi.so.8", "libz.so.1"} <= ours
    original = str(Path(python).resolve().parents[1])
    assert not [file for file in files if file.startswith(original)]


def test_interpreters_of_other_versions_are_rejected(script, tmp_path):
    with pytest.raises(script.KitFailed, match=r"/bin/sh is not a CPython 3\.10"):
        script.copy_python(Path("/bin/sh"), tmp_path / "env")
    (tmp_path / "file").touch()
    with pytest.raises(script.KitFailed, match="is not empty"):
        script.make(tmp_path, Path("/bin/sh"), 1)


def test_pieces_have_a_size(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script.sys, "argv", ["make-dashinfer-kit", str(tmp_path), "--piece-mib", "0"])
    monkeypatch.setattr(script, "make", lambda *_: [])
    with pytest.raises(SystemExit):
        script.main()
    assert "--piece-mib: at least 1" in capsys.readouterr().err
