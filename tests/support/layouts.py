"""Devices, and on GPUs both layouts of what a table keeps of its ids."""

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
    """As the fixture of all tests, and GPUs whose tables are packed where they can be."""
    device = request.param.split(",")[0]
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if request.param == device:
        yield device
        return
    before = _C.set_packed_from(0)
    yield device
    _C.set_packed_from(before)
