"""CONTRIBUTING's example backend has at most 60 lines and trains with every optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.optim import RowWiseAdagrad

from tests.support.code_blocks import code_blocks
from tests.support.models import make_model, shard_model
from torchrec_hkv import ParameterConstraints
from torchrec_hkv.backends import names

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
ROWS, DIM = 6, 4
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.1}),
}


def skeleton() -> str:
    (code,) = (b.code for b in code_blocks(PAGE) if "class PlainBackend" in b.code)
    return code


def _features(ids, lengths, device) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.tensor(ids, device=device),
        lengths=torch.tensor(lengths, device=device),
    )


# Every row of both tables is in the batch, since torch's optimizers move all rows. "a" and "b"
# share the table of sums; "c" has means. Two samples; one bag is empty.
BATCH = ([0, 1, 2, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 5], [3, 1, 0, 3, 4, 3])


def _train(rank, world_size, device, code, optimizer, sharding_type) -> Any:
    if "plain" not in names():
        exec(compile(code, "CONTRIBUTING.md", "exec"), {"__name__": "skeleton"})
    common = {"num_embeddings": ROWS, "embedding_dim": DIM}
    tables = [
        EmbeddingBagConfig(name="sums", feature_names=["a", "b"], **common),
        EmbeddingBagConfig(name="means", feature_names=["c"], pooling=PoolingType.MEAN, **common),
    ]
    constraint = ParameterConstraints(compute_kernels=["plain"], sharding_types=[sharding_type])
    kind, arguments = OPTIMIZERS[optimizer]
    torch.manual_seed(rank)
    model = shard_model(
        make_model(tables, kind, arguments),
        {"sums": constraint, "means": constraint},
        world_size,
        device,
    )
    every_id = _features([*range(ROWS)] * 3, [1] * (3 * ROWS), device)

    def rows():
        with torch.no_grad():
            pooled = model(every_id).cpu()
        assert torch.equal(pooled[:, :DIM], pooled[:, DIM : 2 * DIM])
        return pooled[:, DIM:].split(DIM, dim=1)

    before = [part.clone() for part in rows()]
    factors = torch.linspace(0.5, 2.0, 2 * 3 * DIM, device=device).view(2, 3 * DIM)
    for _ in range(3):
        (model(_features(*BATCH, device)) * factors).sum().backward()
    return before, rows()


def _expected(before, optimizer):
    weights = [part.clone().requires_grad_() for part in before]
    kind, arguments = OPTIMIZERS[optimizer]
    reference = kind(weights, **arguments)
    factors = torch.linspace(0.5, 2.0, 2 * 3 * DIM).view(2, 3 * DIM)
    ids, lengths = BATCH
    bags = list(torch.tensor(ids).split(lengths))  # features by samples
    for _ in range(3):
        columns = []
        for feature, table in enumerate((0, 0, 1)):
            rows = [weights[table][bag] for bag in bags[2 * feature : 2 * feature + 2]]
            pooled = [r.mean(0) if table == 1 else r.sum(0) for r in rows]
            columns.append(torch.stack(pooled))
        reference.zero_grad()
        (torch.cat(columns, dim=1) * factors).sum().backward()
        reference.step()
    return [weight.detach() for weight in weights]


def test_length():
    assert sum(bool(line.strip()) for line in skeleton().splitlines()) <= 60


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("world_size", "sharding_type"), [(1, "table_wise"), (2, "row_wise")])
def test_trains(run_ranks, optimizer, world_size, sharding_type):
    for before, after in run_ranks(world_size, _train, skeleton(), optimizer, sharding_type):
        for own, expected, initial in zip(after, _expected(before, optimizer), before, strict=True):
            assert not torch.equal(own, initial)
            torch.testing.assert_close(own, expected)
