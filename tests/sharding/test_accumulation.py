"""``accumulate_gradients``: one update trains the tables on several backwards."""

from __future__ import annotations

import pytest
import torch

from tests.support.small_models import batch, make_small
from torchrec_hkv import accumulate_gradients


def _rows(rank, world_size, device, sharding_type):
    """Outputs of both batches after training on them: accumulated, and as one batch."""
    at_once, held = (make_small(world_size, device, "hkv", sharding_type) for _ in range(2))
    batches = [batch(rank, device, seed) for seed in (0, 1)]
    with accumulate_gradients(held):
        first = held(batches[0])
        first[:, :4].sum().backward()
    untrained = held.eval()(batches[0])
    held.train()
    torch.testing.assert_close(untrained[:, :4], first[:, :4], rtol=0, atol=0)
    held(batches[1])[:, :4].sum().backward()
    merged = _merged(batches, device)
    at_once(merged)[:, :4].sum().backward()
    held.eval(), at_once.eval()
    return [
        torch.stack([model(features)[:, :4].detach().cpu() for features in batches])
        for model in (held, at_once)
    ]


def _merged(batches, device):
    """Concatenates two batches."""
    keys = batches[0].keys()
    parts = [[features[key] for features in batches] for key in keys]
    return type(batches[0])(
        keys=keys,
        values=torch.cat([part.values() for of_key in parts for part in of_key]).to(device),
        lengths=torch.cat([part.lengths() for of_key in parts for part in of_key]).to(device),
    )


@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
def test_as_one_batch(run_ranks, sharding_type):
    for held, at_once in run_ranks(2, _rows, sharding_type):
        torch.testing.assert_close(held, at_once, rtol=1e-5, atol=1e-6)


def _refused(rank, world_size, device):
    # Table-wise: the other rank must fail too, instead of waiting.
    with (
        pytest.raises(
            ValueError, match=r"Table 't' is on backend 'toy', which can't accumulate grad"
        ),
        accumulate_gradients(make_small(world_size, device, "toy", "table_wise")),
    ):
        pass
    with (
        pytest.raises(ValueError, match="no tables on backends, so there is nothing to accumulate"),
        accumulate_gradients(torch.nn.Linear(2, 2)),
    ):
        pass


def test_models_that_can_not(run_ranks):
    run_ranks(2, _refused)
