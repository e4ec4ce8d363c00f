"""Rule 29: code in the cache folder. The compiled libraries are one function that returns a number, and DashInfer's
environment is a shell script."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import platform
import resource
import shutil
import sys

import pytest

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders.dashinfer import convert
from dashinfer_vlm_core.decoders.dashinfer.convert import ConvertedModel
from dashinfer_vlm_core.decoders.dashinfer.environment import (
    examine,
    find_environment,
    private_environment,
    private_folder,
)
from dashinfer_vlm_core.decoders.dashinfer.install import install
from dashinfer_vlm_core.errors import MissingDependency, SetupError
from dashinfer_vlm_cpu import build
from dashinfer_vlm_cpu.build import BuildError, load_library
from dashinfer_vlm_cpu.library_cache import LibraryCache
from tests.waiting import HANG

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)) or platform.machine() != "x86_64",
    reason="no C compiler, or its flags are not those of this processor",
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")

STRANGER = 54321
"""A user id other than ours and root's."""


def write_source(folder, number):
    source = folder / f"source-{number}" / "number.c"
    source.parent.mkdir(exist_ok=True)
    source.write_text(f"int number(void) {{ return {number}; }}\n")
    return source


def load(folder, number=1):
    """Compile a function that returns `number`, or load it from the cache; returns what the loaded one returns."""
    return load_library(write_source(folder, number), folder / "cache").number()


@pytest.fixture
def planted(tmp_path):
    """The content of another library, whose function returns 2."""
    folder = tmp_path / "other"
    folder.mkdir()
    assert load(folder, 2) == 2
    (path,) = cached(folder)
    return path.read_bytes()


def cached(folder):
    return [path for path in (folder / "cache").iterdir() if path.suffix == ".so"]


@pytest.fixture
def library(tmp_path):
    """The path of a library in the cache, which the dynamic loader does not know: the library was compiled elsewhere.

    Its name does not depend on the folder.
    """
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert load(elsewhere) == 1
    (compiled,) = cached(elsewhere)
    (tmp_path / "cache").mkdir(mode=0o700)
    path = tmp_path / "cache" / compiled.name
    path.write_bytes(compiled.read_bytes())
    path.chmod(0o600)
    return path


def assert_replaced(library, caplog, reason):
    """Assert that the cached file is not loaded, that one line reports it, and that a good one replaces it."""
    with caplog.at_level(logging.WARNING):
        assert load(library.parent.parent) == 1
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("dashinfer_vlm_cpu")]
    assert message == f"{library} is not loaded: {reason}. The kernels are compiled again."
    caplog.clear()
    assert load(library.parent.parent) == 1
    assert not caplog.records
    (stored,) = cached(library.parent.parent)
    assert stored.stat().st_mode & 0o777 == 0o600
    assert not stored.is_symlink()


@needs_compiler
def test_security_29_truncated_library_is_compiled_again(library, caplog):
    os.truncate(library, 4096)
    assert_replaced(library, caplog, "it is damaged: its content does not match the digest in its name")


@needs_compiler
def test_security_29_empty_library_is_compiled_again(library, caplog):
    os.truncate(library, 0)
    assert_replaced(library, caplog, "it is damaged: its content does not match the digest in its name")


@needs_compiler
def test_security_29_flipped_bit_is_found(library, caplog):
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)
    assert_replaced(library, caplog, "it is damaged: its content does not match the digest in its name")


@needs_compiler
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_security_29_library_writable_by_others_is_not_loaded(library, caplog, mode):
    library.chmod(mode)
    assert_replaced(library, caplog, "other users can write to it")


@needs_compiler
@as_root
def test_security_29_library_of_another_user_is_not_loaded(library, caplog):
    os.chown(library, STRANGER, STRANGER)
    assert_replaced(library, caplog, "it belongs to another user")


@needs_compiler
def test_security_29_symbolic_link_is_not_followed(library, tmp_path, caplog):
    target = tmp_path / "planted.so"
    library.rename(target)
    library.symlink_to(target)
    assert_replaced(library, caplog, "it is a symbolic link")
    assert target.exists()


@needs_compiler
def test_security_29_named_pipe_does_not_block(library, caplog):
    library.unlink()
    os.mkfifo(library, 0o600)
    assert_replaced(library, caplog, "it is not a regular file")


@needs_compiler
def test_security_29_planted_content_does_not_run(library, planted, caplog):
    library.write_bytes(planted)
    assert_replaced(library, caplog, "it is damaged: its content does not match the digest in its name")


@needs_compiler
def test_security_29_folder_writable_by_others_is_not_used(library):
    library.parent.chmod(0o770)
    with pytest.raises(BuildError, match=r"the cache .* is not used: other users can write to it; run `chmod go-w"):
        load(library.parent.parent)


@needs_compiler
@as_root
def test_security_29_folder_of_another_user_is_not_used(library):
    os.chown(library.parent, STRANGER, STRANGER)
    with pytest.raises(BuildError, match=r"the cache .* is not used: it belongs to another user"):
        load(library.parent.parent)


@needs_compiler
def test_security_29_each_library_is_the_one_asked_for(tmp_path):
    """The dynamic loader identifies a library by its path, and descriptors are numbers that can be used again."""
    assert [load(tmp_path, number) for number in (1, 2, 3, 1, 2)] == [1, 2, 3, 1, 2]


@needs_compiler
def test_security_29_library_replaced_after_the_check_is_not_loaded(library, planted):
    stem, _, _ = library.name.rpartition("-")
    with LibraryCache.open(library.parent) as cache:
        checked = cache.find(stem)
        library.unlink()
        library.write_bytes(planted)
        assert checked.load().number() == 1


@needs_compiler
def test_security_29_folder_replaced_after_the_check_is_not_used(library, planted):
    stem, _, _ = library.name.rpartition("-")
    with LibraryCache.open(library.parent) as cache:
        library.parent.rename(library.parent.with_name("moved"))
        library.parent.mkdir()
        library.write_bytes(planted)
        assert cache.find(stem).load().number() == 1


class CountingCompiler:
    """The real compiler, with a log of its compilations."""

    def __init__(self, folder):
        self.folder = folder
        self._log = folder.with_name("compilations")
        folder.mkdir()
        (folder / "cc").write_text(
            f"""#!/bin/sh
export PATH='{os.environ["PATH"]}'
[ "$1" = --version ] || echo compiled >> '{self._log}'
exec cc "$@"
"""
        )
        (folder / "cc").chmod(0o755)

    @property
    def runs(self):
        return len(self._log.read_text().splitlines())


@needs_compiler
def test_security_29_concurrent_processes_compile_once(tmp_path, monkeypatch):
    """Each caller opens and locks the folder itself, as a process does: the package's own lock is not involved."""
    source, compiler = write_source(tmp_path, 1), CountingCompiler(tmp_path / "compiler")
    monkeypatch.setenv("PATH", str(tmp_path / "compiler"))
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        results = [pool.submit(load_library, source, tmp_path / "cache") for _ in range(6)]
        assert [result.result(timeout=HANG).number() for result in results] == [1] * 6
    assert compiler.runs == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_security_29_failed_write_leaves_no_file(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "cache").mkdir(mode=0o700)
    with LibraryCache.open(tmp_path / "cache") as cache:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                cache.store("stem", bytes(2000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "cache").iterdir())


@needs_compiler
def test_security_29_environments_share_a_library(tmp_path, monkeypatch):
    """Neither the folder of the compiler nor that of the source is part of the key."""
    compiler = CountingCompiler(tmp_path / "compiler")
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        monkeypatch.setenv("PATH", str(shutil.copytree(compiler.folder, tmp_path / folder / "bin")))
        assert load_library(write_source(tmp_path / folder, 1), tmp_path / "cache").number() == 1
    assert compiler.runs == 1


@pytest.fixture
def installed(tmp_path):
    """A cache with an environment of DashInfer whose interpreter records that it was executed."""
    config = EngineConfig(cache_dir=tmp_path)
    folder = private_folder(config)
    python = private_environment(folder).python
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\ntouch \'{tmp_path / "executed"}\'\necho \'{{"version": "2", "cpu_only": true}}\'\n')
    python.chmod(0o755)
    (folder / "environment.json").write_text("{}")
    (python.parent / "python3").symlink_to("python")
    return config


def assert_not_executed(config, reason):
    with pytest.raises(MissingDependency, match=f"{reason}. Delete the folder and run") as error:
        examine(find_environment(config))
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
@pytest.mark.parametrize("path", [".", "env", "env/bin/python"])
def test_security_29_dashinfer_environment_writable_by_others_is_not_executed(installed, path):
    exposed = private_folder(installed) / path
    exposed.chmod(exposed.stat().st_mode | 0o020)
    assert_not_executed(installed, "other users can write to it")


@needs_other_python
@as_root
def test_security_29_dashinfer_environment_of_another_user_is_not_executed(installed):
    os.chown(private_folder(installed) / "env" / "bin" / "python", STRANGER, STRANGER)
    assert_not_executed(installed, "it belongs to another user")


def test_security_29_stub_libraries_writable_by_others_are_not_loaded(tmp_path):
    """They are also used by an interpreter that the user selected."""
    config = EngineConfig(cache_dir=tmp_path, dashinfer_python=sys.executable)
    stubs = private_folder(config) / "stubs"
    stubs.mkdir(parents=True)
    assert find_environment(config).stubs == stubs
    stubs.chmod(0o775)
    with pytest.raises(MissingDependency, match="other users can write to it"):
        find_environment(config)


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
