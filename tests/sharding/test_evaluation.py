"""In evaluation mode a lookup changes nothing in a table."""

from __future__ import annotations

import pytest
import torch

from tests.support.backends import BACKENDS
from tests.support.small import batch, make_small, outputs_and_train


def _evaluate(rank, world_size, device, backend):
    model = make_small(world_size, device, backend)
    outputs_and_train(model, rank, device, steps=1)
    lookup = model.module.ebc.group_lookups()["t"]
    sizes = [lookup.counters("t")["size"]]
    model.eval()
    with torch.no_grad():
        first = model(batch(rank, device, seed=1))
        second = model(batch(rank, device, seed=1))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not first.requires_grad
    sizes.append(lookup.counters("t")["size"])
    model.train()
    outputs_and_train(model, rank, device, steps=4, seed=1)
    sizes.append(lookup.counters("t")["size"])
    return sizes


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_inserts_nothing(run_ranks, backend):
    results = run_ranks(2, _evaluate, backend)
    before, evaluated, trained = (sum(sizes) for sizes in zip(*results, strict=True))
    assert before == evaluated
    assert trained > evaluated
