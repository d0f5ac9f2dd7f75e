"""A model trains the same with and without activation checkpointing.

The reentrant kind runs the forward under ``torch.no_grad()`` first, and again with autograd in the
backward. That first lookup is an evaluation lookup: it reads rows that the second inserts.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagConfig

from tests.support.models import make_model, shard_model
from tests.support.small_models import batch
from torchrec_hkv import HKVOptions, ParameterConstraints
from torchrec_hkv.hash_table import MinFrequency
from torchrec_hkv.sharding import table_counters

STEPS = 6


def _make(world_size, device, options, rows):
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=[feature])
        for name, feature in (("t", "f"), ("s", "g"))
    ]
    # On a GPU new ids would race for slots, and the tables' orders would differ.
    constraint = ParameterConstraints(
        compute_kernels=["hkv"],
        sharding_types=["row_wise"],
        options=HKVOptions(**{"deterministic": device.type == "cuda", **options}),
    )
    model = make_model(tables, torch.optim.Adagrad, {"lr": 0.1})
    return shard_model(model, dict.fromkeys(("t", "s"), constraint), world_size, device)


def _train(rank, world_size, device, is_reentrant, options, rows):
    plain, checkpointed = (_make(world_size, device, options, rows) for _ in range(2))
    over = nn.Parameter(torch.ones(8, device=device))  # the reentrant kind needs such an input
    outputs = []
    for step in range(STEPS):
        ids = batch(rank, device, seed=step)
        expected = (plain(ids) * over).sum()
        expected.backward()
        got = checkpoint(
            lambda scale, ids=ids: (checkpointed(ids) * scale).sum(),
            over,
            use_reentrant=is_reentrant,
        )
        got.backward()
        outputs.append((expected.detach().cpu(), got.detach().cpu()))
    held = [
        {
            key: {name: t.cpu().clone() for name, t in lookup.export_table(key).items()}
            for key, lookup in model.module.ebc.group_lookups().items()
        }
        for model in (plain, checkpointed)
    ]
    return outputs, held, table_counters(plain), table_counters(checkpointed)


@pytest.mark.parametrize("is_reentrant", [True, False])
@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, 256),
        ({"admission": MinFrequency(2, entries=512)}, 256),
        ({"deterministic": True}, 16),  # evicts ids
    ],
    ids=["room for all", "admission", "evicting"],
)
def test_trains_as_without(run_ranks, is_reentrant, options, rows):
    if not is_reentrant and "admission" in options:
        pytest.skip("both of its lookups are training lookups, which count each id twice")
    evicted = 0
    for outputs, (plain, checkpointed), *counters in run_ranks(
        2, _train, is_reentrant, options, rows
    ):
        for expected, got in outputs:
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
        if is_reentrant:
            assert counters[0] == counters[1]
            for key, state in plain.items():
                assert all(torch.equal(state[name], checkpointed[key][name]) for name in state)
        evicted += sum(counts["evicted"] for counts in counters[0].values())
    assert (evicted > 0) == (rows == 16)
