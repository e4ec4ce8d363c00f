"""Read tensors from base64 text: safetensors files, and `torch.save` files of one tensor, without unpickling.

A `torch.save` file is a zip archive with a pickle and the tensor's bytes. The pickle of a plain dense tensor always has
the same opcodes, so it is never executed: its opcodes are matched against the expected sequence, and the shape and type
are read from their fixed positions. Any other pickle is rejected.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import safetensors

from ..errors import InvalidParameter, MediaUndecodable
from ..protocol import EncodedEmbeddings
from .source import check_base64, from_base64
from .types import Grid

Array: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = npt.NDArray[np.float32]

ROWS = "image_embeds"
GRID = "image_grid_thw"
MAX_PATCHES = 2**31 - 1

_MAX_HEADER_BYTES = 65536  # of a safetensors file; the header of two tensors has a few hundred bytes
_MAX_PICKLE_BYTES = 4096  # of a tensor's pickle, which has about 160 bytes
_MAX_ENTRIES = 64  # files in an archive; torch.save writes seven
_DIRECTORY_ENTRY = b"PK\x01\x02"

_TYPES: Mapping[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}
"""numpy dtypes by safetensors dtype; numpy has no bfloat16, which is the upper half of a float32."""

_STORAGES: Mapping[str, str] = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
}
"""safetensors dtypes by the storage class that torch.save writes."""

_INT_OPCODES = frozenset({"BININT", "BININT1", "BININT2", "LONG1"})
_IGNORED_OPCODES = frozenset({"PROTO", "BINPUT"})

# Opcodes as `_opcodes` formats them; repr() escapes the arguments.
_PLAIN_TENSOR = re.compile(
    r"GLOBAL 'torch\._utils _rebuild_tensor_v2' MARK"
    r" MARK BINUNICODE 'storage' GLOBAL 'torch (?P<storage>\w+)' BINUNICODE '(?P<key>[0-9]+)'"
    r" BINUNICODE '[a-z]+(?::[0-9]+)?' INT (?P<size>[0-9]+) TUPLE BINPERSID"
    r" INT 0 (?P<shape>(?:INT [0-9]+ ){1,2})TUPLE[12] (?P<strides>(?:INT [0-9]+ ){1,2})TUPLE[12] NEW(?:TRUE|FALSE)"
    r" GLOBAL 'collections OrderedDict' EMPTY_TUPLE REDUCE TUPLE REDUCE STOP"
)


def read_embeddings(encoded: EncodedEmbeddings, *, path: str, max_bytes: int) -> tuple[Rows, Grid]:
    """Read the visual tokens of a request and their grid.

    Args:
        encoded: base64 of safetensors files, or of `torch.save` files of one dense tensor each. Rows are float32,
            float16 or bfloat16, the grid is int64 or int32. A safetensors file has the tensors `image_embeds`,
            `image_grid_thw`, or both if `encoded` has no separate grid.
        path: the part's path in the request, used in errors.
        max_bytes: maximum bytes of a file.

    Returns:
        The results of `as_rows` and `as_grid`.

    Raises:
        MediaTooLarge: a file has more than `max_bytes` bytes.
        MediaUndecodable: a file has another format, is damaged, or has other contents.
        InvalidParameter: the rows or the grid are missing or invalid, see `as_rows` and `as_grid`.
    """
    arrays = _read(encoded.rows, {ROWS} if encoded.grid else {ROWS, GRID}, path=path, max_bytes=max_bytes)
    if isinstance(encoded.grid, str):
        arrays |= _read(encoded.grid, {GRID}, path=path, max_bytes=max_bytes)
    elif encoded.grid is not None:
        arrays[GRID] = np.asarray(encoded.grid)
    return as_rows(arrays.get(ROWS), path=path), as_grid(arrays.get(GRID), path=path)


def as_rows(array: Array | None, *, path: str) -> Rows:
    """Copy the rows to float32 [tokens, hidden size]; values beyond float32 become infinite.

    Raises:
        InvalidParameter: the array is missing, is empty, is not two-dimensional, or is not floating-point.
    """
    if array is None or array.dtype.kind != "f" or array.ndim != 2 or not array.size:
        raise InvalidParameter(
            "Embeddings must be floats of shape [tokens, hidden size]. Send them as `image_embeds`.",
            param=path,
        )
    with np.errstate(over="ignore"):
        return np.array(array, dtype=np.float32, order="C")


def as_grid(array: Array | None, *, path: str) -> Grid:
    """Return the patches along time, height and width, from three integers or one row of three.

    Raises:
        InvalidParameter: the array is missing, is not three integers, or has one below 1.
    """
    is_valid = array is not None and array.dtype.kind in "iu" and array.shape in {(3,), (1, 3)}
    sizes = array.ravel().tolist() if array is not None and is_valid else [0]
    if min(sizes) < 1 or math.prod(sizes) > MAX_PATCHES:
        raise InvalidParameter(
            "Embeddings need the grid of their one image or video: its patches along time, height and width, as three"
            " positive integers.",
            param=path,
        )
    return Grid(*sizes)


def _read(text: str, names: set[str], *, path: str, max_bytes: int) -> dict[str, Array]:
    # A `torch.save` file has the rows if these are in `names`, else the grid.
    check_base64(text, limit=max_bytes, path=path)
    data = from_base64(text, path=path)
    try:
        tensors = (
            {max(names - {GRID}, default=GRID): _read_torch_save(data)}
            if data[:2] == b"PK"
            else _read_safetensors(data)
        )
        if not tensors.keys() <= names:
            raise ValueError("the file has other tensors")
    except Exception as error:  # third-party parsers raise arbitrary exceptions on damaged data
        raise MediaUndecodable(
            "The embeddings are neither a safetensors file of image_embeds and image_grid_thw, nor one dense,"
            " contiguous tensor written by torch.save. Save them with safetensors.",
            param=path,
        ) from error
    return tensors


def _to_array(dtype: str, shape: Sequence[int], data: bytes) -> Array:
    """Convert the little-endian values of a dense, row-major tensor to float32 or int64.

    Args:
        dtype: a key of `_TYPES`.
        shape: the declared shape, which is not checked yet.
        data: the values.

    Raises:
        ValueError: the data does not match the shape.
    """
    values = np.frombuffer(data, _TYPES[dtype])
    if math.prod(shape) != len(values):
        raise ValueError(f"the shape {shape} does not match {len(values)} values")
    if dtype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32 if dtype.endswith(("F32", "F16")) else np.int64).reshape(shape)


def _read_safetensors(data: bytes) -> dict[str, Array]:
    if int.from_bytes(data[:8], "little") > _MAX_HEADER_BYTES:
        raise ValueError("the header is too long")
    tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]  # safetensors leaves it untyped
    return {name: _to_array(item["dtype"], item["shape"], bytes(item["data"])) for name, item in tensors}


def _read_torch_save(data: bytes) -> Array:
    if data.count(_DIRECTORY_ENTRY) > _MAX_ENTRIES:  # zipfile creates an object for each
        raise ValueError("the archive has too many files")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        folder = archive.namelist()[0].partition("/")[0]
        if _read_stored(archive, f"{folder}/byteorder", b"little") != b"little":
            raise ValueError("the tensor is not little-endian")
        pickled = _read_stored(archive, f"{folder}/data.pkl")[:_MAX_PICKLE_BYTES]
        match = _PLAIN_TENSOR.fullmatch(" ".join(_opcodes(pickled)))
        if match is None:
            raise ValueError("the pickle is not a plain dense tensor")
        shape = _parse_ints(match["shape"])
        strides = _parse_ints(match["strides"])
        if int(match["size"]) != math.prod(shape) or not _is_contiguous(shape, strides):
            raise ValueError("the tensor is a view of another tensor")
        values = _read_stored(archive, f"{folder}/data/{match['key']}")
        return _to_array(_STORAGES[match["storage"]], shape, values)


def _read_stored(archive: zipfile.ZipFile, name: str, default: bytes | None = None) -> bytes:
    # An uncompressed file is never larger than the archive.
    if default is not None and name not in archive.namelist():
        return default
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise ValueError("the file is compressed, which torch.save never does")
    return archive.read(info)


def _opcodes(pickled: bytes) -> Iterator[str]:
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name not in _IGNORED_OPCODES:
            name = "INT" if opcode.name in _INT_OPCODES else opcode.name
            yield name if argument is None else f"{name} {argument!r}"


def _parse_ints(opcodes: str) -> tuple[int, ...]:
    return tuple(map(int, opcodes.replace("INT", "").split()))


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the tensor is row-major without gaps; the stride of an axis of length 1 is ignored."""
    step = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != step:
            return False
        step *= length
    return True
