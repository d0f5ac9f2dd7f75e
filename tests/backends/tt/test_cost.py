"""The operation count of a step on a Tensor-Train table equals a count product by product."""

from __future__ import annotations

import pytest
import torch

from torchrec_hkv.backends.tt.cost import tt_work
from torchrec_hkv.backends.workload import Workload
from torchrec_hkv.tensor_train import TTShape

_SHAPES = [
    TTShape(35, 12, (5, 7), (3, 4), (6,)),
    TTShape(60, 24, (3, 4, 5), (2, 3, 4), (6, 8)),
    TTShape(120, 24, (2, 3, 4, 5), (2, 2, 3, 2), (4, 6, 5)),
]


def _counted(shape, ids):
    """Multiplications and additions that make the rows of ids; each product of slices counts
    once."""
    made, operations = set(), 0
    for row in sorted(set(ids)):
        digits, left = [], row
        for p in reversed(shape.p):
            digits.append(left % p)
            left //= p
        digits = tuple(reversed(digits))
        columns = shape.q[0]
        for k in range(1, shape.num_cores):
            columns *= shape.q[k]
            key = digits[: k + 1]
            if key not in made:
                made.add(key)
                # [columns before, r_k] times [r_k, q_k * r_k+1]
                operations += 2 * columns * shape.full_ranks[k] * shape.full_ranks[k + 1]
    return operations


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("lookups", [4, 40, 4000])
def test_operations_of_a_forward(shape, lookups):
    generator = torch.Generator().manual_seed(lookups)
    counted, said = [], []
    for _ in range(300):
        ids = torch.randint(shape.num_embeddings, (lookups,), generator=generator).tolist()
        counted.append(_counted(shape, ids))
        load = Workload(ids=lookups, distinct=len(set(ids)), bags=lookups)
        (flop,) = [v for k, v in tt_work(shape, load, "cpu").forward.items() if "flop" in k]
        said.append(flop)
    # The formula assumes that distinct ids draw their prefixes at random, with repeats.
    assert sum(said) == pytest.approx(sum(counted), rel=0.2)


@pytest.mark.parametrize("shape", _SHAPES)
def test_of_a_whole_table(shape):
    count = shape.num_embeddings
    exact = _counted(shape, range(count))
    load = Workload(ids=1e9, distinct=count, bags=1e9)
    forward = next(v for k, v in tt_work(shape, load, "cpu").forward.items() if "flop" in k)
    assert forward == pytest.approx(exact, rel=0.3)
    assert forward <= exact


def test_ranks_have_constants_by_class():
    load = Workload(ids=10, distinct=10, bags=10)
    for ranks, cpu, cuda in (((8, 8), 16, 32), ((33, 12), 64, 64), ((128, 100), 128, 128)):
        shape = TTShape(10**6, 64, (100, 100, 100), (4, 4, 4), ranks)
        for device_type, kind in (("cpu", cpu), ("cuda", cuda)):
            work = tt_work(shape, load, device_type)
            assert f"flop_rank_{kind}" in work.forward
            assert work.backward["core_bytes"] == 4 * shape.num_elements


def test_a_gpu_fills_ranks_up():
    load = Workload(ids=1000, distinct=1000, bags=1000)
    full = TTShape(10**6, 64, (100, 100, 100), (4, 4, 4), (32, 32))
    lower = TTShape(10**6, 64, (100, 100, 100), (4, 4, 4), (24, 24))
    of = {s.ranks: tt_work(s, load, "cuda").forward["flop_rank_32"] for s in (full, lower)}
    assert of[24, 24] == pytest.approx(1.5 * of[32, 32])
