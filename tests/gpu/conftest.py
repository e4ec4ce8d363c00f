from __future__ import annotations

import pytest

from dashinfer_vlm_core.kernels.devices import cuda_devices
from tests.dashinfer.conftest import cache, decoder, environment, one_thread, oracle

__all__ = ["cache", "decoder", "environment", "one_thread", "oracle"]


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not cuda_devices():
        pytest.skip("There is no CUDA device here.")
