"""The torch placeholder equals torch in everything that DashInfer's converter uses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dashinfer_vlm_core.decoders.dashinfer import torch_placeholder as placeholder


@pytest.mark.parametrize("value", [True, False, 0, -7, 2**40, 1.5, 1e-6, 10000.0, [1, 2], [0.5, 3.0]])
def test_attributes_are_the_same_bytes(value):
    assert placeholder.tensor(value).numpy().tobytes() == torch.tensor(value).numpy().tobytes()


@pytest.fixture
def stored(tmp_path):
    """Return a file of tensors in each dtype, and torch's float32 conversion of them."""
    generator = torch.Generator().manual_seed(0)
    made = {
        str(dtype): torch.randn(5, 3, generator=generator, dtype=torch.float64).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }
    made |= {"bias": torch.arange(4.0), "special": torch.tensor([float("inf"), -0.0, 1e-40]).bfloat16()}
    save_file(made | {"nothing": torch.zeros(0, 3), "integers": torch.arange(3)}, tmp_path / "model.safetensors")
    file = placeholder.SafetensorsFile(str(tmp_path / "model.safetensors"))
    return file, {name: tensor.float() for name, tensor in made.items()}


def same(ours, expected):
    assert tuple(ours.shape) == tuple(expected.shape)
    assert str(ours.dtype) == str(expected.dtype) == "torch.float32"
    read = np.from_dlpack(Capsule(ours))
    assert read.tobytes() == expected.contiguous().numpy().tobytes()
    assert read.shape == tuple(expected.shape)


class Capsule:
    """An object from which numpy reads a DLPack capsule."""

    def __init__(self, tensor):
        self._array = np.require(tensor.numpy(), np.float32, ["C", "A", "W"])
        self._capsule = placeholder.to_dlpack(tensor)

    def __dlpack__(self, **_):
        return self._capsule

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_every_stored_dtype_is_read_as_in_torch(stored):
    file, expected = stored
    for name, tensor in expected.items():
        same(file.tensor(name), tensor)
    assert file.tensor("nothing").numpy().shape == (0, 3)


def test_transposed_and_joined_tensors_equal_torch(stored):
    file, expected = stored
    names = ["torch.bfloat16", "torch.float32", "torch.float16"]
    joined = placeholder.concat([file.tensor(name) for name in names]).cpu()
    same(joined, torch.concat([expected[name] for name in names]))
    same(placeholder.permute(joined, (1, 0)).contiguous().to("cpu"), torch.concat([expected[n] for n in names]).T)
    same(placeholder.Tensor(0), torch.Tensor(0))


def test_unsupported_dtype_is_named(stored):
    file, _ = stored
    with pytest.raises(TypeError, match=r"integers in .* has the unsupported dtype I64"):
        file.tensor("integers")


def test_unused_attributes_are_absent():
    assert not placeholder.cuda.is_available()
    assert not hasattr(placeholder, "load")
