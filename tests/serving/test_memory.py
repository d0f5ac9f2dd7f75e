"""Tables are mapped and shared by processes, or read into one process's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.served_models import SEEDS, random_batch
from torchrec_hkv import serving
from torchrec_hkv.serving.resident_file import read_resident


def mapped_files() -> str:
    """Files that this process has mapped."""
    return Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("mapped", [True, False])
def test_same_outputs(served, mapped):
    folder, want = served
    model = serving.load(folder, mapped=mapped)
    for seed, its in zip(SEEDS, want, strict=True):
        got = model(*random_batch(seed, 2 + seed))
        assert all(torch.equal(got[key], value) for key, value in its.items())
    assert (f"{folder}/rows-0000.table" in mapped_files()) == mapped


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4096, 5000, 8 << 20, (24 << 20) + 17])
def test_resident_file(tmp_path, size, direct):
    """Memory is aligned to cache lines, also for sizes that are no multiple of a page or a
    piece."""
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    path = tmp_path / "data"
    path.write_bytes(data.numpy().tobytes())
    got = read_resident(path, size, direct)
    assert torch.equal(got, data)
    assert got.data_ptr() % 64 == 0
    with pytest.raises(ValueError, match=f"ends at byte {size}, but must have {size + 1} bytes"):
        read_resident(path, size + 1, direct)


def test_resident_memory():
    ops = torch.ops.torchrec_hkv
    # Undefined contents: results of two runs may differ.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.serving_memory, (5000,), test_utils=checks)
