"""Converted weights: a later start loads them from a file, if it may trust that file."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import weakref
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from dashinfer_vlm_core import VLM, SamplingParams
from dashinfer_vlm_core.models.weight_cache import converted
from dashinfer_vlm_core.models.weight_cache.checkpoint_key import checkpoint_key
from dashinfer_vlm_core.models.weight_cache.file_budget import WeightFolder
from dashinfer_vlm_core.models.weights import Weights
from dashinfer_vlm_cpu import huge_pages
from tests.kernels import needs_native
from tests.waiting import until

MIB = 1 << 20
KEY = "a" * 64
LAYERS = {
    "one": {"weights": torch.arange(300, dtype=torch.uint8), "scales": torch.rand(5)},
    "two": {"weights": torch.rand(7, 3).bfloat16(), "sizes": torch.tensor([7, 3, 0]), "empty": torch.empty(0)},
}
PROMPT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def stored(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.weights"))


def is_storing():
    return any(thread.name == "dashinfer-vlm-store-weights" for thread in threading.enumerate())


def set_disk(monkeypatch, total, free):
    disk = shutil._ntuple_diskusage(total, total - free, free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)


@pytest.fixture(autouse=True)
def empty_disk(monkeypatch):
    """Let files be stored if the disk of this machine is nearly full."""
    set_disk(monkeypatch, 1 << 40, 1 << 40)


@pytest.fixture
def written(tmp_path):
    """Return a folder with one file."""
    folder = tmp_path / "weights"
    WeightFolder(folder, budget=MIB).write(KEY, LAYERS)
    return folder


def test_written_tensors_are_read_again(written):
    opened = WeightFolder(written, budget=MIB).open(KEY)
    for layer, tensors in LAYERS.items():
        for name, tensor in tensors.items():
            read = opened.layers[layer][name]
            assert read.dtype == tensor.dtype
            assert torch.equal(read, tensor)
    assert (written.stat().st_mode & 0o777, stored(written)[0].stat().st_mode & 0o777) == (0o700, 0o600)


def damage_header(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[60] ^= 1
    file.write_bytes(content)


def link(file: Path) -> None:
    file.symlink_to(file.rename(file.with_suffix(".moved")))


UNUSABLE = {
    "others may write to the file": (lambda file: file.chmod(0o602), "other users can write to it"),
    "others may write to the folder": (lambda file: file.parent.chmod(0o770), "other users can write to it"),
    "damaged header": (damage_header, "its header is damaged"),
    "truncated": (lambda file: os.truncate(file, 4000), "incomplete"),
    "empty": (lambda file: os.truncate(file, 0), "it has no header"),
    "symbolic link": (link, "symbolic links"),
}


@pytest.mark.parametrize(("change", "reason"), UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_file_is_reported_and_replaced(change, reason, written, caplog):
    (file,) = stored(written)
    change(file)
    assert WeightFolder(written, budget=MIB).open(KEY) is None
    assert reason in caplog.text
    if file.parent.stat().st_mode & 0o020:
        file.parent.chmod(0o700)
    WeightFolder(written, budget=MIB).write(KEY, LAYERS)
    assert WeightFolder(written, budget=MIB).open(KEY) is not None


def test_file_in_a_read_only_folder_is_used(written, monkeypatch, caplog):
    def read_only(descriptor):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", read_only)
    assert WeightFolder(written, budget=MIB).open(KEY) is not None
    assert not caplog.records


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_file_of_root_is_used_by_others_and_that_of_others_is_not(written, monkeypatch, caplog):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert WeightFolder(written, budget=MIB).open(KEY) is not None
    os.chown(stored(written)[0], 1001, -1)
    assert WeightFolder(written, budget=MIB).open(KEY) is None
    assert "it belongs to another user" in caplog.text


def test_file_under_the_name_of_another_key_is_not_used(written):
    stored(written)[0].rename(written / f"{'b' * 32}.weights")
    assert WeightFolder(written, budget=MIB).open("b" * 64) is None


def test_least_recently_used_file_is_removed(tmp_path):
    layers = {"one": {"weights": torch.zeros(400_000, dtype=torch.uint8)}}
    folder = WeightFolder(tmp_path, budget=MIB)
    for number, key in enumerate("ab"):
        folder.write(key * 64, layers)
        os.utime(tmp_path / f"{key * 32}.weights", (number, number))
    assert folder.open("a" * 64)  # b is now the one that was not used for longer
    folder.write("c" * 64, layers)
    assert [file.name[0] for file in stored(tmp_path)] == ["a", "c"]


def test_larger_file_than_the_budget_is_not_written(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    WeightFolder(tmp_path, budget=MIB).write(KEY, {"one": {"weights": torch.zeros(2 * MIB, dtype=torch.uint8)}})
    assert not stored(tmp_path)
    assert "`weight_cache_mib` is 1" in caplog.text


@pytest.mark.parametrize(("free", "kept"), [(50_000, "ab"), (700_000, "bc"), (3_000_000, "abc")])
def test_files_are_removed_only_if_that_makes_space(free, kept, tmp_path, monkeypatch):
    layers = {"one": {"weights": torch.zeros(500_000, dtype=torch.uint8)}}
    folder = WeightFolder(tmp_path, budget=64 * MIB)
    for number, key in enumerate("ab"):
        folder.write(key * 64, layers)
        os.utime(tmp_path / f"{key * 32}.weights", (number, number))
    set_disk(monkeypatch, 6_000_000, free)  # of which 600,000 bytes stay free
    folder.write("c" * 64, layers)
    assert "".join(file.name[0] for file in stored(tmp_path)) == kept


def test_folder_that_cannot_be_written_is_reported(tmp_path, caplog):
    (tmp_path / "file").touch()
    WeightFolder(tmp_path / "file" / "weights", budget=MIB).write(KEY, LAYERS)
    assert "cannot be stored" in caplog.text


def test_abandoned_parts_are_removed(tmp_path):
    (tmp_path / "abandoned.part").touch()
    WeightFolder(tmp_path, budget=MIB).write(KEY, LAYERS)
    assert not list(tmp_path.glob("*.part"))


def test_key_changes_with_content_of_same_size_and_time(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(100))
    before = checkpoint_key(tmp_path, ["text"])
    status = file.stat()
    assert checkpoint_key(tmp_path, ["text"]) == before != checkpoint_key(tmp_path, ["vision"])

    def is_noticed():  # the clock of a file system has ticks of some milliseconds
        file.write_bytes(bytes(99) + b"1")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        return checkpoint_key(tmp_path, ["text"]) != before

    until(is_noticed)


def test_mapped_file_is_copied_to_one_mapping_of_huge_pages(tmp_path):
    size = 4 * huge_pages.HUGE_PAGE_SIZE
    content = torch.arange(size, dtype=torch.int32).to(torch.uint8)
    folder = WeightFolder(tmp_path, budget=64 * MIB)
    folder.write(KEY, {"one": {"weights": content}})
    opened = folder.open(KEY)
    start = huge_pages._address(opened.memory)
    aligned = start + -start % huge_pages.HUGE_PAGE_SIZE
    assert mapping(aligned).file == str(stored(tmp_path)[0])
    huge_pages.replace(weakref.ref(opened.memory), len(opened.memory))
    copied = mapping(aligned)
    assert not copied.file
    assert copied.end - copied.start >= 3 * huge_pages.HUGE_PAGE_SIZE
    assert torch.equal(opened.layers["one"]["weights"], content)


class Mapping(NamedTuple):
    start: int
    end: int
    file: str


def mapping(address: int) -> Mapping:
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, file = [*line.split(maxsplit=5), ""][:6]
        start, end = (int(part, 16) for part in addresses.split("-"))
        if start <= address < end:
            return Mapping(start, end, file)
    raise AssertionError(address)


OPTIONS = {"device": "cpu", "dtype": "bfloat16", "kv_cache_mib": 64, "media_workers": 0}
SETTINGS = {
    "12 bits": {},
    "8 bits": {"quantization": "int8"},
    "4 bits": {"quantization": "int4"},
    "int8 keys": {"kv_cache_dtype": "int8"},
}


@needs_native
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_second_start_converts_nothing_and_answers_the_same(options, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(converted, "MIN_BYTES", 0)
    matrices = []
    matrix = Weights.matrix

    def counted(self, modules, *args, **more):
        matrices.extend(modules)
        return matrix(self, modules, *args, **more)

    monkeypatch.setattr(Weights, "matrix", counted)
    first = answer(tiny_checkpoint, tmp_path, options)
    assert len(stored(tmp_path / "weights")) == 2  # text model and vision encoder
    assert matrices
    matrices.clear()
    assert answer(tiny_checkpoint, tmp_path, options) == first
    assert all(name.endswith(("q_proj", "k_proj", "v_proj")) for name in matrices)
    assert bool(matrices) == ("kv_cache_dtype" in options)  # balanced projections are converted at each start


@needs_native
def test_disabled_cache_stores_nothing(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(converted, "MIN_BYTES", 0)
    answer(tiny_checkpoint, tmp_path, {"weight_cache_mib": 0})
    assert not (tmp_path / "weights").exists()


def answer(checkpoint, cache, options):
    with VLM(model=str(checkpoint), cache_dir=cache, **OPTIONS, **options) as vlm:
        (output,) = vlm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8, logprobs=2), use_tqdm=False)
        until(lambda: not is_storing())
    return list(output.outputs[0].token_ids), output.outputs[0].cumulative_logprob
