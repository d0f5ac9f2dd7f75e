"""Batches of data-parallel tables with a separate batch size for each feature."""

from __future__ import annotations

import torch
from torchrec import KeyedJaggedTensor

from tests.sharding.test_data_parallel import FEATURES, ROWS, make

TABLES, SAMPLES = ("t", "u"), 6


def _batch(step, rank, device):
    """Every feature has fewer bags than samples; some samples share a bag."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    draw = lambda high, size: torch.randint(0, high, size, generator=generator)  # noqa: E731
    keys = [key for name in TABLES for key in FEATURES[name]]
    rows = [ROWS[name] for name in TABLES for _ in FEATURES[name]]
    bags = [4 + rank, 6, 3]
    lengths = [draw(4, (count,)) for count in bags]
    ids = [draw(n, (int(of.sum()),)) for n, of in zip(rows, lengths, strict=True)]
    inverse = torch.stack([draw(count, (SAMPLES,)) for count in bags])
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat(ids).to(device),
        lengths=torch.cat(lengths).to(device),
        stride_per_key_per_rank=[[count] for count in bags],
        inverse_indices=(keys, inverse.to(device)),
    )


def _train(rank, world_size, device, sharding_type):
    model = make("sum", "adagrad", sharding_type, world_size, device, TABLES)
    outputs = []
    for step in range(3):
        out = model(_batch(step, rank, device))
        outputs.append(out.detach().cpu())
        out.square().sum().backward()
    return outputs


def test_trains_as_table_wise(run_ranks):
    parallel, wise = (run_ranks(2, _train, kind) for kind in ("data_parallel", "table_wise"))
    for ours, others in zip(parallel, wise, strict=True):
        assert ours[0].shape == (3 * SAMPLES, 1)
        for one, other in zip(ours, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
