"""Tables are mapped, and shared by processes, or read into memory of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.served import SEEDS, batch_of
from torchrec_hkv import serving


def mapped_files() -> str:
    """What this process has mapped."""
    return Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("mapped", [True, False])
def test_same_outputs(served, mapped):
    folder, want = served
    model = serving.load(folder, mapped=mapped)
    for seed, its in zip(SEEDS, want, strict=True):
        got = model(*batch_of(seed, 2 + seed))
        assert all(torch.equal(got[key], value) for key, value in its.items())
    assert (f"{folder}/rows-0000.table" in mapped_files()) == mapped


def test_resident_memory():
    """Aligned to cache lines, also for sizes that are no multiple of a page."""
    ops = torch.ops.torchrec_hkv
    for size in (0, 1, 5000, 3 << 20):
        data = torch.randint(0, 256, (size,), dtype=torch.uint8)
        got = ops.serving_resident(data)
        assert torch.equal(got, data)
        assert size == 0 or got.data_ptr() != data.data_ptr()
        assert got.data_ptr() % 64 == 0
    torch.library.opcheck(ops.serving_resident.default, (data,))
    # Its contents are undefined, so that results of two runs may differ.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.serving_memory, (5000,), test_utils=checks)
    with pytest.raises(TypeError, match="data must be of dtype"):
        ops.serving_resident(torch.zeros(2))
