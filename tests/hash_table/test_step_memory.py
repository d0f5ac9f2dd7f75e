"""Temporary memory of a training step on a GPU, beside rows, outputs and gradients."""

import os

import pytest
import torch

from tests.support.batches import rate
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.hash_table import RowWiseAdagrad, TableGroup, TableSpec, Uniform

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        bool(os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")),
        reason="torch counts nothing without its allocator",
    ),
]

TABLES, ROWS, DIM, BAG = 8, 1 << 19, 128, 10
MAX = 24  # bytes an id
COUNTS = 1 << 15  # bytes of counts per table, under adaptive eviction


@pytest.fixture(scope="module", params=["lru", "adaptive"])
def eviction(request):
    return request.param


@pytest.fixture(scope="module")
def group(eviction):
    """A group in which all ids are present."""
    specs = [
        TableSpec(f"t{t}", int(ROWS / 0.8), DIM, initializer=Uniform(-1, 1), eviction=eviction)
        for t in range(TABLES)
    ]
    group = TableGroup(specs, list(range(TABLES)), RowWiseAdagrad(), device="cuda")
    for part in torch.arange(ROWS, device="cuda").split(1 << 16):
        ends = torch.arange(TABLES + 1, device="cuda") * len(part)
        group.find_or_insert(part.repeat(TABLES), ends, 1)
    return group


def draw(kind, n):
    """Ids of a batch."""
    if kind == "uniform":
        return torch.randint(ROWS, (n,), device="cuda")
    return (float(ROWS) ** torch.rand(n, dtype=torch.float64, device="cuda")).long() - 1


def requested(what):
    """Bytes requested from torch; the allocator's blocks may be larger by up to 1 MiB each."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]


def taken_by_step(group, ids, batch, mean):
    """Peak bytes of the find, and of lookup and backward without the output."""
    offsets = torch.arange(TABLES * batch + 1, device="cuda") * BAG
    anchor = torch.empty(0, device="cuda", requires_grad=True)
    learning_rate = rate(0.1, group)
    grad = torch.randn(batch, TABLES * DIM, device="cuda")
    torch.cuda.synchronize()  # now the host knows the previous batches
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    pin = group.pin()
    slots = group.find_or_insert(ids, offsets, batch, pin)
    to_find = requested("peak") - before
    assert requested("current") - before == slots.nbytes
    torch.cuda.reset_peak_memory_stats()
    out = group.pooled_lookup(anchor, ids, offsets, None, slots, batch, mean, pin, learning_rate)
    out.backward(grad)
    return to_find, requested("peak") - before - out.nbytes


# At 2256 the find's scratch table is largest: 2^19 words for slightly more than .34 times as many
# ids.
@pytest.mark.parametrize("batch", [3276, 2256])
@pytest.mark.parametrize("mean", [False, True])
def test_at_most_24_bytes_an_id(group, eviction, mean, batch):
    """At most 24 bytes an id of scratch for find and update, whatever the ids."""
    n = TABLES * batch * BAG
    for kind in ("uniform", "power law"):
        for _ in range(3):  # previous batches decide how ids are sorted
            taken_by_step(group, draw(kind, n), batch, mean)
        to_find, to_update = taken_by_step(group, draw(kind, n), batch, mean)
        print(f"{kind}: {to_find / n:.3f} bytes an id to find, {to_update / n:.3f} to update")
        assert 8 * n < to_find <= MAX * n + (COUNTS if eviction == "adaptive" else 0)
        assert 8 * n < to_update <= MAX * n


@pytest.mark.parametrize("kind", ["uniform", "power law"])
def test_a_step_leaves_nothing_behind(group, kind):
    batch = 3276
    ids = draw(kind, TABLES * batch * BAG)
    taken_by_step(group, ids, batch, False)
    before = requested("current")
    taken_by_step(group, ids, batch, False)
    assert requested("current") == before
