"""Base64 text -> tensors: safetensors files, and what `torch.save` writes of one tensor, read without running anything.

A `torch.save` payload is a zip archive with a pickle and the tensor's bytes. The pickle of a plain dense tensor always
has the same steps, so it is not run, nor interpreted: its steps are compared with those, and the shape and type are
read from the places where they must stand. Whatever else a pickle says is no tensor here.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import safetensors

from ..errors import InvalidParameter, MediaUndecodable
from ..protocol import EncodedEmbeddings
from .source import check_base64, from_base64

Array: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = npt.NDArray[np.float32]
GridShape: TypeAlias = tuple[int, int, int]

ROWS = "image_embeds"
GRID = "image_grid_thw"
MAX_PATCHES = 2**31 - 1

_HEADER = 65536  # bytes of a safetensors header: those of two tensors have some hundred
_PICKLE = 4096  # bytes of a tensor's pickle, which has some 160
_ENTRIES = 64  # files in an archive of torch.save, which writes seven
_DIRECTORY_ENTRY = b"PK\x01\x02"

_TYPES: Mapping[str, str] = MappingProxyType({"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"})
"""How numpy reads the bytes of each type; it has no bfloat16, which is the upper half of a float32."""

_STORAGES: Mapping[str, str] = MappingProxyType(
    {"FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "LongStorage": "I64", "IntStorage": "I32"}
)
"""The types above as torch.save names them."""

_WHOLE_NUMBERS = frozenset({"BININT", "BININT1", "BININT2", "LONG1"})
_BOOKKEEPING = frozenset({"PROTO", "BINPUT"})

# Steps as `_steps` writes them; repr() of the arguments keeps each on its line.
_PLAIN_TENSOR = re.compile(
    r"GLOBAL 'torch\._utils _rebuild_tensor_v2' MARK"
    r" MARK BINUNICODE 'storage' GLOBAL 'torch (?P<storage>\w+)' BINUNICODE '(?P<key>[0-9]+)'"
    r" BINUNICODE '[a-z]+(?::[0-9]+)?' INT (?P<size>[0-9]+) TUPLE BINPERSID"
    r" INT 0 (?P<shape>(?:INT [0-9]+ ){1,2})TUPLE[12] (?P<strides>(?:INT [0-9]+ ){1,2})TUPLE[12] NEW(?:TRUE|FALSE)"
    r" GLOBAL 'collections OrderedDict' EMPTY_TUPLE REDUCE TUPLE REDUCE STOP"
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tensor:
    """A dense tensor, in rows, whose size is not checked yet.

    Attributes:
        kind: a key of `_TYPES`.
        shape: as it says.
        data: its numbers, little endian.
    """

    kind: str
    shape: tuple[int, ...]
    data: bytes

    def array(self) -> Array:
        """float32 or int64; raises ValueError where the data is not of the shape."""
        numbers = np.frombuffer(self.data, _TYPES[self.kind])
        if math.prod(self.shape) != len(numbers):
            raise ValueError("there are more or fewer numbers than the shape says")
        if self.kind == "BF16":
            numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
        return numbers.astype(np.float32 if self.kind.endswith(("F32", "F16")) else np.int64).reshape(self.shape)


def read_embeddings(encoded: EncodedEmbeddings, *, part: str, max_bytes: int) -> tuple[Rows, GridShape]:
    """The visual tokens that a request brings along, and their grid.

    Args:
        encoded: base64 of safetensors files, or of `torch.save` payloads of one dense tensor each. Rows are float32,
            float16 or bfloat16, the grid is int64 or int32. A safetensors file has the tensors `image_embeds`,
            `image_grid_thw`, or both where no other grid is given.
        part: names it in errors.
        max_bytes: most bytes of a payload.

    Returns:
        As `as_rows` and `as_grid`.

    Raises:
        MediaTooLarge: more than `max_bytes`.
        MediaUndecodable: it is neither, is damaged, or holds something else.
        InvalidParameter: as `as_rows` and `as_grid`.
    """
    found = _read(encoded.rows, {ROWS} if encoded.grid else {ROWS, GRID}, part=part, max_bytes=max_bytes)
    if isinstance(encoded.grid, str):
        found |= _read(encoded.grid, {GRID}, part=part, max_bytes=max_bytes)
    elif encoded.grid is not None:
        found[GRID] = np.asarray(encoded.grid)
    return as_rows(found.get(ROWS), part=part), as_grid(found.get(GRID), part=part)


def as_rows(found: Array | None, *, part: str) -> Rows:
    """A copy of the rows as float32 [tokens, hidden size]; what is too large for that becomes infinite.

    Raises:
        InvalidParameter: they have another number of axes, no entries, or another type.
    """
    if found is None or found.dtype.kind != "f" or found.ndim != 2 or not found.size:
        raise InvalidParameter(
            "Embeddings of a picture are floats of the shape [tokens, hidden size]: give them as image_embeds.",
            param=part,
        )
    with np.errstate(over="ignore"):
        return np.array(found, dtype=np.float32, order="C")


def as_grid(found: Array | None, *, part: str) -> GridShape:
    """Patches along time, height and width, of three numbers or of one row of three.

    Raises:
        InvalidParameter: they are not three, not whole, or not at least 1 each.
    """
    whole = found is not None and found.dtype.kind in "iu" and found.shape in {(3,), (1, 3)}
    numbers = found.ravel().tolist() if found is not None and whole else [0]
    if min(numbers) < 1 or math.prod(numbers) > MAX_PATCHES:
        raise InvalidParameter(
            "Embeddings come with the grid of their one picture or video: its patches along time, height and width, as"
            " three whole numbers.",
            param=part,
        )
    time, height, width = numbers
    return time, height, width


def _read(text: str, names: set[str], *, part: str, max_bytes: int) -> dict[str, Array]:
    """Arrays by name, of these names alone; a `torch.save` payload holds the rows, or else the grid."""
    check_base64(text, limit=max_bytes, part=part)
    data = from_base64(text, part=part)
    try:
        tensors = {max(names - {GRID}, default=GRID): _torch_saved(data)} if data[:2] == b"PK" else _safetensors(data)
        if not tensors.keys() <= names:
            raise ValueError("there are other tensors")
        return {name: tensor.array() for name, tensor in tensors.items()}
    except Exception as error:  # the parsers of other people raise whatever broken bytes lead them to
        raise MediaUndecodable(
            "This is neither a safetensors file of image_embeds and image_grid_thw, nor one dense, contiguous tensor as"
            " torch.save writes it; save it with safetensors.",
            param=part,
        ) from error


def _safetensors(data: bytes) -> dict[str, _Tensor]:
    if int.from_bytes(data[:8], "little") > _HEADER:
        raise ValueError("the header is too long")
    found = safetensors.deserialize(data)  # type: ignore[no-untyped-call]  # safetensors leaves it untyped
    return {
        name: _Tensor(kind=item["dtype"], shape=tuple(item["shape"]), data=bytes(item["data"])) for name, item in found
    }


def _torch_saved(data: bytes) -> _Tensor:
    if data.count(_DIRECTORY_ENTRY) > _ENTRIES:  # zipfile would make an object of each
        raise ValueError("there are too many files")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        folder = archive.namelist()[0].partition("/")[0]
        if _stored(archive, f"{folder}/byteorder", b"little") != b"little":
            raise ValueError("its bytes are in another order")
        steps = _PLAIN_TENSOR.fullmatch(" ".join(_steps(_stored(archive, f"{folder}/data.pkl")[:_PICKLE])))
        if steps is None:
            raise ValueError("this is no plain tensor")
        shape, strides = _numbers(steps["shape"]), _numbers(steps["strides"])
        if int(steps["size"]) != math.prod(shape) or not _in_rows(shape, strides):
            raise ValueError("this is a view of another tensor")
        return _Tensor(
            kind=_STORAGES[steps["storage"]], shape=shape, data=_stored(archive, f"{folder}/data/{steps['key']}")
        )


def _stored(archive: zipfile.ZipFile, name: str, default: bytes | None = None) -> bytes:
    """A file of an archive, which may not be compressed: none is larger than the archive."""
    if default is not None and name not in archive.namelist():
        return default
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise ValueError("torch.save does not compress")
    return archive.read(info)


def _steps(pickled: bytes) -> Iterator[str]:
    """What a pickle would do, step by step, without what it remembers and nowhere uses."""
    for step, argument, _ in pickletools.genops(pickled):
        if step.name not in _BOOKKEEPING:
            name = "INT" if step.name in _WHOLE_NUMBERS else step.name
            yield name if argument is None else f"{name} {argument!r}"


def _numbers(steps: str) -> tuple[int, ...]:
    return tuple(map(int, steps.replace("INT", "").split()))


def _in_rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the numbers lie row by row, without gaps; the stride along an axis of one means nothing."""
    step = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != step:
            return False
        step *= length
    return True
