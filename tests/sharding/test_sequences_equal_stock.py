"""Sequences on a backend equal those of stock ``fused`` tables: the same losses and rows."""

from __future__ import annotations

import pytest
import torch

from tests.support.backends import BACKENDS
from tests.support.pairwise import pairwise
from tests.support.sequences import SequenceScenario, train_sequences
from tests.support.stock_comparison import OPTIMIZERS

pytestmark = pytest.mark.compat

SHARDING_TYPES = ["row_wise", "table_wise", "column_wise"]


def _check(outcome):
    stock, backend_losses = outcome.losses.unbind(1)
    torch.testing.assert_close(backend_losses, stock, rtol=1e-5, atol=1e-5)
    assert stock[-1] != stock[0]
    for rows in outcome.rows.values():
        torch.testing.assert_close(rows[1], rows[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "optimizer", "sharding_type", "world_size"),
    pairwise(BACKENDS, OPTIMIZERS, SHARDING_TYPES, [1, 2, 3]),
)
def test_equal_to_stock(run_ranks, backend, optimizer, sharding_type, world_size):
    scenario = SequenceScenario(backend, sharding_type, optimizer)
    for outcome in run_ranks(world_size, train_sequences, scenario):
        _check(outcome)


@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.parametrize("dedup", [False, True])
def test_ids_are_given_back_raw(run_ranks, sharding_type, dedup):
    scenario = SequenceScenario("hkv", sharding_type, need_indices=True, dedup=dedup)
    for outcome in run_ranks(2, train_sequences, scenario):
        _check(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_ids_sent_once_train_alike_and_are_looked_up_less(run_ranks_once, sharding_type, optimizer):
    lookups = []
    for dedup in (False, True):
        scenario = SequenceScenario("hkv", sharding_type, optimizer, dedup=dedup)
        outcomes = run_ranks_once(2, train_sequences, scenario)
        for outcome in outcomes:
            _check(outcome)
        lookups.append(sum(outcome.lookups for outcome in outcomes))
    assert 0 < lookups[1] < lookups[0]


@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.parametrize("dedup", [False, True])
def test_batch_sizes_of_features(run_ranks, sharding_type, dedup):
    scenario = SequenceScenario("hkv", sharding_type, dedup=dedup, variable=True)
    for outcome in run_ranks(2, train_sequences, scenario):
        _check(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_narrow_exchange(run_ranks_once, sharding_type, wire):
    exact, narrow = (
        run_ranks_once(2, train_sequences, SequenceScenario("hkv", sharding_type, wire=chosen))
        for chosen in (None, wire)
    )
    full_stock, full_ours = torch.stack([outcome.losses for outcome in exact]).unbind(2)
    stock, backend_losses = torch.stack([outcome.losses for outcome in narrow]).unbind(2)
    effect = (stock - full_stock).abs().max()
    assert 0 < effect < 0.02 * full_stock.abs().max()
    assert (backend_losses - full_ours).abs().max() > 0
    assert (backend_losses - stock).abs().max() < 4 * effect
