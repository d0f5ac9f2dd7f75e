"""Memory that CPU kernels keep from one call to the next: it does not change results, and a step
takes no fresh pages."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor

import torch

from tests.support import tensor_train as tt
from torchrec_hkv.hash_table import SGD
from torchrec_hkv.tensor_train import TTGroup, TTShape

#: Sums of the gradients of this table take some 50 MB in a step.
FOUR_CORES = TTShape(11_253_000, 64, (55, 60, 55, 62), (2, 4, 4, 2), (4, 32, 2))
SHAPES = [*tt.LARGER, TTShape(11_220, 64, (102, 110), (8, 8), (8,))]
STEPS = 3


class _Trained:
    """A table and its batches, which are the same for each object of a seed."""

    def __init__(self, shape: TTShape, seed: int, ids: int) -> None:
        torch.manual_seed(seed)
        self.cores = tt.random_cores(shape)
        self._group = TTGroup([shape], optimizer=SGD())
        self._states = self._group.make_states("cpu")
        self._count = torch.zeros(1, dtype=torch.int64)
        self._anchor = torch.zeros(0, requires_grad=True)
        self._rate = torch.tensor(0.1)
        self._offsets = torch.arange(0, ids + 1, 2)
        self._ids = torch.randint(shape.num_embeddings, (STEPS, ids))
        self._grad = torch.randn(ids // 2, shape.embedding_dim)

    def step(self, number: int) -> None:
        self._group.lookup_fused(
            self._anchor,
            self.cores,
            self._states,
            self._count,
            self._ids[number],
            self._offsets,
            self._grad.shape[0],
            self._rate,
        ).backward(self._grad)

    def run(self) -> list[torch.Tensor]:
        for number in range(STEPS):
            self.step(number)
        return self.cores


def _all(seed: int) -> list[_Trained]:
    return [_Trained(shape, seed + at, 600 + 2 * at) for at, shape in enumerate(SHAPES)]


def _assert_equal(trained: list[_Trained], expected: list[list[torch.Tensor]]) -> None:
    for table, cores in zip(trained, expected, strict=True):
        for core, other in zip(table.cores, cores, strict=True):
            assert torch.equal(core, other)


def test_tables_in_turns():
    expected = [table.run() for table in _all(3)]
    in_turns = _all(3)
    for number in range(STEPS):
        for table in in_turns:
            table.step(number)
    _assert_equal(in_turns, expected)


def test_tables_at_once():
    expected = [table.run() for table in _all(11)]
    at_once = _all(11)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_Trained.run, at_once))
    _assert_equal(at_once, expected)


def test_no_fresh_pages(set_threads):
    set_threads(2)  # each thread has buffers of its own besides
    table = _Trained(FOUR_CORES, 5, 20_000)
    table.run()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    table.run()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 2_000 * STEPS, faults
