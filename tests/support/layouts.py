"""Devices, and on GPUs both layouts of a table's ids."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torchrec_hkv import _C


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cuda, packed", marks=pytest.mark.gpu),
    ]
)
def device_type(request: pytest.FixtureRequest) -> Iterator[str]:
    """Like the common fixture, but also GPUs with packed tables where possible."""
    device = request.param.split(",")[0]
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if request.param == device:
        yield device
        return
    before = _C.set_packed_from(0)
    yield device
    _C.set_packed_from(before)
