"""Recorders of work for machines without CUDA graphs; see `dashinfer_vlm_core.kernels.graphs`."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def repeat(work):
    """Record work by computing it again; like a graph, it always returns the same tensor."""
    result = work().clone()
    return lambda: result.copy_(work())


def check_recordable(work):
    """Record work that must not use memory of the CPU, which a CUDA graph would read again after it was freed."""
    work()  # as before a graph is recorded: what is computed only once may be copied
    with _DeviceMemoryOnly():
        result = work()
    return lambda: result


class _DeviceMemoryOnly(TorchDispatchMode):
    """Fails where an operation has a tensor on the CPU; a scalar is an argument of a kernel."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves((args, kwargs, result)):
            assert not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu" or not tensor.dim(), func
        return result
