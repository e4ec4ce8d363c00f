"""The torch placeholder equals torch in everything that DashInfer's converter uses."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from dashinfer_vlm_dashinfer import torch_placeholder as placeholder

KINDS = pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])


@pytest.mark.parametrize("value", [True, False, 0, -7, 2**40, 1.5, 1e-6, 10000.0, [1, 2], [0.5, 3.0]])
def test_attributes_are_the_same_bytes(value):
    assert placeholder.tensor(value).numpy().tobytes() == torch.tensor(value).numpy().tobytes()


@pytest.fixture
def stored(tmp_path):
    """Return a file of tensors in each dtype, and the tensors."""
    generator = torch.Generator().manual_seed(0)
    made = {
        str(dtype): torch.randn(5, 3, generator=generator, dtype=torch.float64).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }
    made |= {"bias": torch.arange(4.0), "special": torch.tensor([float("inf"), -0.0, 1e-40]).bfloat16()}
    made["rounded"] = torch.tensor([1e5, -1e5, 3.4e38, 1e-8, 0.1, 1 + 2**-8, 1 + 3 * 2**-8])
    save_file(made | {"nothing": torch.zeros(0, 3), "integers": torch.arange(3)}, tmp_path / "model.safetensors")
    with placeholder.safe_open(str(tmp_path / "model.safetensors"), framework="pt") as file:
        return file, made


def same(ours, expected):
    assert tuple(ours.shape) == tuple(expected.shape)
    assert str(ours.dtype) == str(expected.dtype)
    read = torch.utils.dlpack.from_dlpack(placeholder.to_dlpack(ours))
    assert read.dtype == expected.dtype
    assert read.float().numpy().tobytes() == expected.float().contiguous().numpy().tobytes()


@KINDS
def test_every_stored_dtype_is_converted_as_in_torch(stored, kind):
    file, tensors = stored
    for name, tensor in tensors.items():
        same(file.get_tensor(name).to(getattr(placeholder, kind)), tensor.to(getattr(torch, kind)))
    assert file.get_tensor("nothing").to(getattr(placeholder, kind)).shape == (0, 3)


@KINDS
def test_transposed_and_joined_tensors_equal_torch(stored, kind):
    file, tensors = stored
    names = ["torch.bfloat16", "torch.float32", "torch.float16"]
    joined = placeholder.concat([file.get_tensor(name).to(getattr(placeholder, kind)) for name in names]).cpu()
    expected = torch.concat([tensors[name].to(getattr(torch, kind)) for name in names])
    same(joined, expected)
    same(placeholder.permute(joined, (1, 0)).contiguous().to("cpu"), expected.T)
    same(placeholder.Tensor(0), torch.Tensor(0))


def test_unsupported_dtype_is_named(stored):
    file, _ = stored
    with pytest.raises(TypeError, match=r"integers in .* has the unsupported dtype I64"):
        file.get_tensor("integers")


def test_unused_attributes_are_absent():
    assert not placeholder.cuda.is_available()
    assert not hasattr(placeholder, "load")
