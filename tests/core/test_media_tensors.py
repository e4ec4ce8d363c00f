"""Embeddings as text: valid and hostile safetensors and torch.save payloads."""

from __future__ import annotations

import base64
import io
import json
import pickle
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors

from dashinfer_vlm_core.errors import InvalidParameter, MediaTooLarge, MediaUndecodable
from dashinfer_vlm_core.media.tensors import as_grid, read_embeddings
from dashinfer_vlm_core.protocol import EncodedEmbeddings
from tests.cases import cases

PART = "messages[0].content[1]"
ROWS = torch.randn((6, 8), generator=torch.Generator().manual_seed(1))
GRID = torch.tensor([[1, 4, 6]])


def text(data):
    return base64.b64encode(data).decode()


def saved(tensor, **options):
    buffer = io.BytesIO()
    torch.save(tensor, buffer, **options)
    return buffer.getvalue()


def read(rows, grid=(1, 4, 6), *, max_bytes=1_000_000):
    encoded = EncodedEmbeddings(
        rows=text(rows) if isinstance(rows, bytes) else rows, grid=text(grid) if isinstance(grid, bytes) else grid
    )
    return read_embeddings(encoded, path=PART, max_bytes=max_bytes)


def refused(error, *arguments, **options):
    with pytest.raises(error) as caught:
        read(*arguments, **options)
    assert caught.value.param == PART
    return caught.value.message


def archive(files, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in files.items():
            file.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def unpacked(data):
    """Return the files written by torch.save, by their names in the archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name.partition("/")[2]: file.read(name) for name in file.namelist()}


def tensors_file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@cases("dtype", [torch.float32, torch.float16, torch.bfloat16])
@cases("whole", [torch.int64, torch.int32])
def test_both_formats_round_trip(dtype, whole):
    rows, grid = ROWS.to(dtype), GRID.to(whole)
    together = save_safetensors({"image_embeds": rows, "image_grid_thw": grid})
    for found in (
        read(together, None),
        read(save_safetensors({"image_embeds": rows}), save_safetensors({"image_grid_thw": grid[0].contiguous()})),
        read(saved(rows), saved(grid)),
        read(saved(rows), saved(grid[0].clone())),
        read(saved(rows), (1, 4, 6)),
    ):
        assert found[0].dtype == np.float32
        assert torch.equal(torch.from_numpy(found[0]), rows.float())
        assert found[1] == (1, 4, 6)


def test_named_or_differentiable_tensor_is_read(tmp_path):
    torch.save(ROWS.clone().requires_grad_(), tmp_path / "rows.pt")
    assert np.array_equal(read((tmp_path / "rows.pt").read_bytes())[0], ROWS.numpy())


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 300), (300, 1), (70000, 2)])
def test_tensors_of_every_size_are_read(rows, width):
    tensor = torch.arange(rows * width, dtype=torch.float32).reshape(rows, width)
    assert np.array_equal(read(saved(tensor))[0], tensor.numpy())
    assert np.array_equal(read(save_safetensors({"image_embeds": tensor}))[0], tensor.numpy())


class Bomb:
    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return open, (str(self._path), "w")


def test_pickle_is_never_executed(tmp_path):
    """The payload does execute code: unpickling it in Python shows this."""
    files = unpacked(saved(ROWS))
    for bomb in (pickle.dumps(Bomb(tmp_path / "hit"), protocol) for protocol in range(6)):
        for pickled in (bomb, bomb[:-1] + files["data.pkl"], files["data.pkl"][:-1] + bomb):
            refused(MediaUndecodable, archive({**files, "data.pkl": pickled}))
        refused(MediaUndecodable, bomb)
        assert not (tmp_path / "hit").exists()
        pickle.loads(bomb).close()
        assert (tmp_path / "hit").exists()
        (tmp_path / "hit").unlink()


@cases(
    "value",
    [
        torch.eye(3).to_sparse(),
        ROWS.t(),
        ROWS[:, :4],
        ROWS[1:],
        ROWS.double(),
        torch.zeros(2, 2, dtype=torch.float8_e4m3fn),
        torch.zeros(2, 2, dtype=torch.complex64),
        torch.nn.Parameter(ROWS),
        ROWS.reshape(1, 6, 8),
        torch.tensor(1.0),
        {"image_embeds": ROWS},
        [ROWS],
        "text",
    ],
)
def test_other_torch_objects_are_rejected(value):
    assert "one dense, contiguous tensor" in refused(MediaUndecodable, saved(value))


@cases(
    "change",
    [
        {"data/0": b""},
        {"data/0": b"\0" * 191},
        {"data/0": b"\0" * 200},
        {"byteorder": b"big"},
        {"data.pkl": b""},
        {"data.pkl": b"\x80\x02."},
        {"data.pkl": b"\xff" * 100},
    ],
)
def test_inconsistent_archive_is_rejected(change):
    files = unpacked(saved(ROWS))
    assert np.array_equal(read(archive(files))[0], ROWS.numpy())
    refused(MediaUndecodable, archive({**files, **change}))


@pytest.mark.parametrize("old", [b"FloatStorage", b"_rebuild_tensor_v2", b"OrderedDict", b"storage", b"torch._utils"])
def test_every_global_in_pickle_is_checked(old):
    files = unpacked(saved(ROWS))
    assert old in files["data.pkl"]
    changed = files["data.pkl"].replace(old, old[:-1] + b"?")
    refused(MediaUndecodable, archive({**files, "data.pkl": changed}))


@pytest.mark.parametrize(
    "size", [b"K\x06K\x09\x86", b"K\x06J\xff\xff\xff\xff\x86", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"]
)
def test_shape_larger_than_data_is_rejected(size):
    files = unpacked(saved(ROWS))
    assert files["data.pkl"].count(b"K\x06K\x08\x86") == 1
    refused(MediaUndecodable, archive({**files, "data.pkl": files["data.pkl"].replace(b"K\x06K\x08\x86", size)}))


def test_zip_bomb_is_rejected_before_decompression():
    """48 MB in 47 kB; the reader would have to allocate them to find out their size."""
    zeros = torch.zeros(12_000_000 // 8, 8)
    bomb = archive(unpacked(saved(zeros)), zipfile.ZIP_DEFLATED)
    assert len(bomb) < 60_000
    refused(MediaUndecodable, bomb)


def test_archive_with_too_many_files_is_rejected():
    files = {**unpacked(saved(ROWS)), **{f"more/{index}": b"" for index in range(100)}}
    refused(MediaUndecodable, archive(files))


@pytest.mark.parametrize("data", [saved(ROWS), save_safetensors({"image_embeds": ROWS})], ids=["torch", "safetensors"])
def test_every_truncation_is_rejected(data):
    for length in range(0, len(data), 7):
        refused(MediaUndecodable, data[:length])


@cases(
    "data",
    [
        tensors_file({"image_embeds": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 999]}}, b"\0" * 16),
        tensors_file({"image_embeds": {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 0]}}, b"\0" * 16),
        tensors_file({"image_embeds": {"dtype": "F32", "shape": [9, 9], "data_offsets": [0, 16]}}, b"\0" * 16),
        tensors_file({"image_embeds": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}}),
        tensors_file({"image_embeds": {"dtype": "F64", "shape": [1, 2], "data_offsets": [0, 16]}}, b"\0" * 16),
        tensors_file({"image_embeds": {"dtype": "U8", "shape": [4, 4], "data_offsets": [0, 16]}}, b"\0" * 16),
        tensors_file({"other": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, b"\0" * 16),
        tensors_file(b"[" * 60_000),
        tensors_file(b"{}", length=2**63),
        tensors_file(b" " * 70_000),
    ],
)
def test_inconsistent_safetensors_file_is_rejected(data):
    refused(MediaUndecodable, data)


def test_second_grid_is_rejected():
    refused(MediaUndecodable, save_safetensors({"image_embeds": ROWS, "image_grid_thw": GRID}), (1, 4, 6))


@pytest.mark.parametrize("rows", [torch.zeros(8), torch.zeros(0, 8), torch.zeros(3, 3, dtype=torch.int64)])
def test_rows_of_wrong_shape_or_dtype_are_rejected(rows):
    assert "[tokens, hidden size]" in refused(InvalidParameter, saved(rows))


@cases(
    "grid",
    [
        saved(torch.tensor([[1, 4, 6], [1, 4, 6]])),
        saved(torch.tensor([1.0, 4.0, 6.0])),
        saved(torch.tensor([1, 4])),
        saved(torch.tensor([[1], [4], [6]])),
        saved(torch.tensor([1, 0, 6])),
        saved(torch.tensor([-1, -4, 6])),
        saved(torch.tensor([1, 2**31, 2**31])),
        (1, 4),
        None,
    ],
)
def test_invalid_grid_is_rejected(grid):
    assert "three positive integers" in refused(InvalidParameter, saved(ROWS), grid)


def test_too_many_bytes_are_rejected_before_decoding():
    size = len(saved(ROWS))
    assert read(saved(ROWS), max_bytes=size)[1] == (1, 4, 6)
    assert str(size - 1) in refused(MediaTooLarge, saved(ROWS), max_bytes=size - 1)
    refused(MediaTooLarge, "!" * 10_000, max_bytes=100)


def test_invalid_base64_is_rejected():
    assert "base64" in refused(MediaUndecodable, "???")
    assert "base64" in refused(MediaUndecodable, saved(ROWS), "???")


@settings(max_examples=300, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_damaged_payloads_raise_only_project_errors(data):
    payload = bytearray(data.draw(st.sampled_from([saved(ROWS), save_safetensors({"image_embeds": ROWS})])))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        rows, _ = read(bytes(payload))
    except (MediaUndecodable, InvalidParameter):
        return
    assert rows.shape == (6, 8)


def test_grid_may_be_array_of_any_integer_dtype():
    assert as_grid(np.array([2, 4, 6], np.uint8), path=PART) == (2, 4, 6)
