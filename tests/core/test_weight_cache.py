"""Converted weights: a later start loads them from a file, if it may trust that file."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import shutil
import threading
import weakref
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from filelock import FileLock

from dashinfer_vlm_core import VLM, EngineConfig, SamplingParams
from dashinfer_vlm_core.concurrency.storing import Canceled, StoreThread, cancel_storing
from dashinfer_vlm_core.engine.managed_models import ManagedModel
from dashinfer_vlm_core.engine.manager import ModelManager
from dashinfer_vlm_core.models.eagle import read_eagle
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_core.models.weight_cache import converted
from dashinfer_vlm_core.models.weight_cache.checkpoint_key import checkpoint_key, source_digest
from dashinfer_vlm_core.models.weight_cache.file_budget import WeightFolder
from dashinfer_vlm_core.models.weights import Weights
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_cpu import huge_pages
from tests.kernels import needs_native
from tests.plugins.drafting import LONG, create, run
from tests.plugins.oracle import Shape, prompt, save_random_model
from tests.plugins.test_torch_eagle import SHAPE as EAGLE_TARGET
from tests.plugins.test_torch_eagle import write_head
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
    return any(isinstance(thread, StoreThread) for thread in threading.enumerate())


def folder_in(cache, *, mib=1, **options) -> WeightFolder:
    return WeightFolder(EngineConfig(cache_dir=cache, weight_cache_mib=mib, **options))


def write(folder, key, layers):
    folder.write(key, layers, lambda: None)


def zeros(size):
    return {"one": {"weights": torch.zeros(size, dtype=torch.uint8)}}


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
    write(folder_in(tmp_path), KEY, LAYERS)
    return tmp_path / "weights"


def test_written_tensors_are_read_again(written):
    opened = folder_in(written.parent).open(KEY)
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
    assert folder_in(written.parent).open(KEY) is None
    assert reason in caplog.text
    if file.parent.stat().st_mode & 0o020:
        file.parent.chmod(0o700)
    write(folder_in(written.parent), KEY, LAYERS)
    assert folder_in(written.parent).open(KEY) is not None


def test_file_is_only_replaced_by_one_with_more_layers(written):
    (file,) = stored(written)
    before = file.stat().st_ino
    write(folder_in(written.parent), KEY, {"one": LAYERS["one"]})
    assert file.stat().st_ino == before
    assert folder_in(written.parent).open(KEY)  # as another process does
    write(folder_in(written.parent), KEY, LAYERS | {"three": LAYERS["one"]})
    assert "three" in folder_in(written.parent).open(KEY).layers


def test_file_in_a_read_only_folder_is_used(written, monkeypatch, caplog):
    def read_only(descriptor):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", read_only)
    assert folder_in(written.parent).open(KEY) is not None
    assert not caplog.records


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_file_of_root_is_used_by_others_and_that_of_others_is_not(written, monkeypatch, caplog):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert folder_in(written.parent).open(KEY) is not None
    os.chown(stored(written)[0], 1001, -1)
    assert folder_in(written.parent).open(KEY) is None
    assert "it belongs to another user" in caplog.text


def test_file_under_the_name_of_another_key_is_not_used(written):
    stored(written)[0].rename(written / f"{'b' * 32}.weights")
    assert folder_in(written.parent).open("b" * 64) is None


def test_file_without_optional_functions_of_the_system(tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    write(folder_in(tmp_path), KEY, LAYERS)
    for name in ("posix_fallocate", "posix_fadvise"):
        monkeypatch.delattr(os, name)
    assert folder_in(tmp_path).open(KEY)
    write(folder_in(tmp_path), "b" * 64, LAYERS)
    assert folder_in(tmp_path).open("b" * 64)


def write_old(cache, keys, layers, **options):
    """Write files that the oldest process used first."""
    for number, key in enumerate(keys):
        write(folder_in(cache, **options), key * 64, layers)
        os.utime(cache / "weights" / f"{key * 32}.weights", (number, number))


def names(cache):
    return "".join(file.name[0] for file in stored(cache / "weights"))


def test_least_recently_used_file_is_removed(tmp_path):
    write_old(tmp_path, "ab", zeros(400_000))
    assert folder_in(tmp_path).open("a" * 64)  # b is now the one that was not used for longer
    write(folder_in(tmp_path), "c" * 64, zeros(400_000))
    assert names(tmp_path) == "ac"


def test_parts_of_a_loaded_model_do_not_remove_each_other(tmp_path, caplog):
    write_old(tmp_path, "a", zeros(400_000))
    folder = folder_in(tmp_path)
    write(folder, "b" * 64, zeros(700_000))
    write(folder, "c" * 64, zeros(700_000))
    assert names(tmp_path) == "b"
    assert "set `weight_cache_mib` to at least 2 to" in caplog.text
    other = folder_in(tmp_path)
    assert other.open("b" * 64)  # a second model that uses the file, and is unloaded
    del other
    write(folder, "c" * 64, zeros(700_000))
    assert names(tmp_path) == "b"
    del folder
    write(folder_in(tmp_path), "c" * 64, zeros(700_000))
    assert names(tmp_path) == "c"


def test_lowered_limit_removes_files_at_the_next_start(tmp_path):
    write_old(tmp_path, "abc", zeros(600_000), mib=2)
    folder = folder_in(tmp_path)
    folder.open("a" * 64)
    folder.shrink()
    assert names(tmp_path) == "a"


def test_larger_file_than_the_budget_is_not_written(tmp_path, caplog):
    write_old(tmp_path, "ab", zeros(600_000), mib=2)
    write(folder_in(tmp_path), "c" * 64, zeros(2 * MIB))
    assert names(tmp_path) == "b"
    assert "Each start converts 2 MiB of weights: set `weight_cache_mib` to at least 3" in caplog.text


@pytest.mark.parametrize(("free", "kept"), [(50_000, "ab"), (700_000, "bc"), (3_000_000, "abc")])
def test_files_are_removed_only_if_that_makes_space(free, kept, tmp_path, monkeypatch):
    write_old(tmp_path, "ab", zeros(500_000), mib=64)
    set_disk(monkeypatch, 6_000_000, free)  # of which 600,000 bytes stay free
    write(folder_in(tmp_path, mib=64), "c" * 64, zeros(500_000))
    assert names(tmp_path) == kept


def test_folder_that_cannot_be_written_is_reported(tmp_path, caplog):
    (tmp_path / "weights").touch()
    write(folder_in(tmp_path), KEY, LAYERS)
    assert "cannot be stored" in caplog.text


def test_abandoned_parts_are_removed(written):
    (written / "abandoned.part").touch()
    write(folder_in(written.parent), "b" * 64, LAYERS)
    assert not list(written.glob("*.part"))


def test_unloaded_model_is_not_stored(tmp_path):
    """While its file is written, and while another process writes."""
    layers = zeros(40 * MIB)
    memory = weakref.ref(layers["one"]["weights"])
    checks = []

    def check():
        checks.append(len(list(tmp_path.glob("weights/*.part"))))
        if sum(checks) == 2:
            raise Canceled

    folder_in(tmp_path, mib=128).write(KEY, layers, check)
    assert checks[-1] == 1
    assert not [file for file in (tmp_path / "weights").iterdir() if file.name != ".lock"]

    folder = folder_in(tmp_path, mib=128)
    with FileLock(tmp_path / "weights" / ".lock"):
        StoreThread("other", functools.partial(folder.write, "b" * 64, zeros(10))).start()
        StoreThread("model", functools.partial(folder.write, KEY, layers)).start()
        del layers
        cancel_storing("model")
        until(lambda: memory() is None)
        assert is_storing()
    until(lambda: not is_storing())
    assert names(tmp_path) == "b"


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


def test_code_of_a_package_is_recognized(tmp_path):
    (tmp_path / "inner").mkdir()
    digests = set()
    for file, content in (("a.py", "1"), ("a.py", "2"), ("inner/b.py", "2"), ("inner/b.txt", "2")):
        (tmp_path / file).write_text(content)
        source_digest.cache_clear()
        digests.add(source_digest(tmp_path))
    assert len(digests) == 3
    before = source_digest(tmp_path / "a.py")
    (tmp_path / "a.py").write_text("3")
    source_digest.cache_clear()
    assert source_digest(tmp_path / "a.py") != before


@pytest.mark.parametrize("pages_at_a_time", [1, 512])
def test_mapped_file_is_copied_to_huge_pages(pages_at_a_time, tmp_path, monkeypatch):
    monkeypatch.setattr(huge_pages, "MAX_COPY_BYTES", pages_at_a_time * huge_pages.HUGE_PAGE_SIZE)
    size = 4 * huge_pages.HUGE_PAGE_SIZE
    content = torch.arange(size, dtype=torch.int32).to(torch.uint8)
    folder = folder_in(tmp_path, mib=64)
    write(folder, KEY, {"one": {"weights": content}})
    opened = folder.open(KEY)
    start = huge_pages._address(opened.memory)
    aligned = start + -start % huge_pages.HUGE_PAGE_SIZE
    assert mapping(aligned).file == str(stored(tmp_path / "weights")[0])
    huge_pages.replace(weakref.ref(opened.memory), len(opened.memory))
    copied = [mapping(aligned + page * huge_pages.HUGE_PAGE_SIZE) for page in range(3)]
    assert not any(each.file for each in copied)
    assert pages_at_a_time == 1 or len(set(copied)) == 1  # joined
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


def record_matrices(monkeypatch) -> list[str]:
    """Return a list to which the names of converted matrices are added."""
    matrices = []
    matrix = Weights.matrix

    def recorded(self, modules, *args, **more):
        matrices.extend(modules)
        return matrix(self, modules, *args, **more)

    monkeypatch.setattr(Weights, "matrix", recorded)
    return matrices


@needs_native
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_second_start_converts_nothing_and_answers_the_same(options, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(converted, "MIN_BYTES", 0)
    matrices = record_matrices(monkeypatch)
    first = answer(tiny_checkpoint, tmp_path, options)
    assert len(stored(tmp_path / "weights")) == 2  # text model and vision encoder
    assert matrices
    matrices.clear()
    assert answer(tiny_checkpoint, tmp_path, options) == first
    assert all(name.endswith(("q_proj", "k_proj", "v_proj")) for name in matrices)
    assert bool(matrices) == ("kv_cache_dtype" in options)  # balanced projections are converted at each start


@needs_native
@pytest.mark.parametrize("has_eagle", [False, True])
def test_second_start_does_not_convert_drafters(has_eagle, tmp_path, monkeypatch):
    monkeypatch.setattr(converted, "MIN_BYTES", 0)
    save_random_model(tmp_path, EAGLE_TARGET)
    if has_eagle:
        write_head(tmp_path / "draft")
        draft = read_eagle(tmp_path / "draft", read_spec(tmp_path).text)
    else:
        (tmp_path / "draft").mkdir()
        save_random_model(tmp_path / "draft", Shape())
        draft = read_spec(tmp_path / "draft")
    matrices = record_matrices(monkeypatch)
    found = []
    for _ in range(2):
        matrices.clear()
        decoder = create(tmp_path, draft, dtype="bfloat16", cache_dir=tmp_path)
        found.append(run(decoder, [prompt(1, 60, **LONG)])[0])
        until(lambda: not is_storing())
        assert len(stored(tmp_path / "weights")) == 2
    assert found[0] == found[1]
    assert not matrices


@needs_native
def test_changed_code_converts_again(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(converted, "MIN_BYTES", 0)
    first = answer(tiny_checkpoint, tmp_path, {})
    folders = []
    monkeypatch.setattr(converted, "source_digest", lambda folder: folders.append(folder.name) or "changed")
    assert answer(tiny_checkpoint, tmp_path, {}) == first
    assert len(stored(tmp_path / "weights")) == 4
    assert {"kernels", "models", "dashinfer_vlm_torch"} <= set(folders)


@needs_native
def test_unloading_a_model_ends_storing(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(converted, "MIN_BYTES", 0)
    (tmp_path / "weights").mkdir(mode=0o700)
    options = {"model": str(tiny_checkpoint), "decoder": "scripted", "cache_dir": tmp_path}
    model = ManagedModel(config=EngineConfig(**OPTIONS, **options))
    with (
        FileLock(tmp_path / "weights" / ".lock"),  # others write
        ModelManager([model], registry=scripted_registry(Script("Yes."))) as manager,
    ):
        assert is_storing()
        asyncio.run(manager.aunload(model.config.name))
        until(lambda: not is_storing())


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
