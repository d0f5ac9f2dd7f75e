"""Writing rows back to the cores is exact if possible and otherwise an approximation; other rows
change little."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_train as tt
from torchrec_hkv.tensor_train import TTShape
from torchrec_hkv.tensor_train.write_back import write_back

SHAPES = [
    TTShape(490, 12, (7, 8, 9), (2, 2, 3), (5, 6)),
    TTShape(56, 6, (7, 8), (2, 3), (4,)),
    TTShape(350, 8, (3, 4, 5, 6), (2, 2, 2, 1), (4, 7, 3)),
]
NONE = torch.empty(0, dtype=torch.int64)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(11)  # the solver's result depends on its start


def table(shape, cores):
    return tt.dense_table(shape, cores).detach()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_that_cores_can_make_are_found(device_type, shape):
    cores = tt.random_cores(shape, device_type)
    near = [core + 0.05 * torch.randn_like(core) for core in cores]
    wanted, ids = table(shape, near), torch.arange(shape.num_embeddings, device=device_type)
    before = (table(shape, cores) - wanted).norm()
    none = NONE.to(device_type)
    ones = torch.ones(ids.numel(), device=device_type)
    write_back(shape, cores, ids, wanted.float(), ones, none, none, iterations=200)
    assert (table(shape, cores) - wanted).norm() < 0.02 * before


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_expected_error_falls(shape):
    cores = tt.random_cores(shape)
    ids = torch.randperm(shape.num_embeddings)
    left, kept = ids[:10], ids[10:]
    wanted = table(shape, cores)
    wanted[left] += torch.randn(10, shape.embedding_dim)
    counts = torch.randint(1, 50, (ids.numel(),))

    def error():
        return float((counts * (table(shape, cores) - wanted)[ids].square().sum(dim=1)).sum())

    before = error()
    write_back(shape, cores, left, wanted[left].float(), counts[:10], kept, counts[10:])
    assert error() < 0.95 * before


def test_counts_decide_between_rows():
    one = TTShape(490, 12, (7, 8, 9), (2, 2, 3), (1, 1))
    wanted = torch.randn(2, 12)
    errors = []
    for counts in ([1000, 1], [1, 1000]):
        cores = tt.random_cores(one)
        ids = torch.tensor([3, 12])  # both ids share a prefix or a slice
        write_back(one, cores, ids, wanted, torch.tensor(counts), NONE, NONE, iterations=100)
        errors.append((table(one, cores)[ids] - wanted).square().sum(dim=1))
    assert errors[0][0] < errors[1][0]
    assert errors[1][1] < errors[0][1]


def test_nothing_to_give_back():
    shape = SHAPES[0]
    cores = tt.random_cores(shape)
    before = [core.clone() for core in cores]
    ids = torch.arange(5)
    write_back(shape, cores, NONE, torch.randn(0, 12), NONE, ids, torch.ones(5))
    same = table(shape, cores)[ids].float()
    write_back(shape, cores, ids, same, torch.ones(5), NONE, NONE)
    for core, old in zip(cores, before, strict=True):
        torch.testing.assert_close(core, old, rtol=1e-5, atol=1e-6)


def test_rows_that_are_not_finite_leave_the_cores_alone():
    shape = SHAPES[1]
    cores = tt.random_cores(shape)
    before = [core.clone() for core in cores]
    rows = torch.full((2, 6), float("nan"))
    write_back(shape, cores, torch.arange(2), rows, torch.ones(2), NONE, NONE)
    assert all(map(torch.equal, cores, before))


def test_bfloat16_cores():
    shape = SHAPES[1]
    cores = tt.random_cores(shape, dtype=torch.bfloat16)
    wanted, ids = torch.randn(2, 6), torch.tensor([1, 2])
    before = (table(shape, cores)[ids] - wanted).norm()
    write_back(shape, cores, ids, wanted, torch.ones(2), NONE, NONE)
    assert (table(shape, cores)[ids] - wanted).norm() < 0.1 * before
