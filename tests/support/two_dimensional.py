"""A small model in a DMPCollection, the same model over all ranks, and the contents of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.models import local_tables, make_model, topology
from torchrec_hkv import (
    DMPCollection,
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    get_default_sharders,
)

BATCH = 6
#: Features and tables: a hash table, a Tensor-Train table and a stock table.
KERNELS = {"hash": "hkv", "cores": "tt", "stock": "fused"}


def configs(rows: int = 512, dim: int = 4) -> list[EmbeddingBagConfig]:
    """Creates one table per feature; ``rows`` is for the hash table."""
    sizes = {"hash": rows, "cores": 64, "stock": 64}
    return [
        EmbeddingBagConfig(name=name, num_embeddings=n, embedding_dim=dim, feature_names=[name])
        for name, n in sizes.items()
    ]


def constraints(
    sharding_type: str = "row_wise", options: HKVOptions | None = None
) -> dict[str, ParameterConstraints]:
    """Returns constraints with a sharding type and options of the hash table."""
    types = {"hash": sharding_type, "cores": "table_wise", "stock": "row_wise"}
    return {
        name: ParameterConstraints(
            compute_kernels=[kernel],
            sharding_types=[types[name]],
            min_partition=4,
            options=options if name == "hash" else None,
        )
        for name, kernel in KERNELS.items()
    }


def make_collection(
    group_size: int,
    world_size: int,
    device: torch.device,
    tables: Sequence[EmbeddingBagConfig],
    constraints: Mapping[str, ParameterConstraints],
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> DMPCollection:
    """Creates the model in groups of ``group_size`` ranks."""
    model = make_model(tables, optimizer, optimizer_kwargs)
    sharders = get_default_sharders()
    planner = EmbeddingShardingPlanner(
        topology=topology(group_size, device), constraints=dict(constraints), batch_size=BATCH
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DMPCollection(
        model, device, plan, world_size, group_size, dist.group.WORLD, sharders=sharders, **kwargs
    )


def random_batch(rank: int, step: int, ids: int = 60, seed: int = 0) -> KeyedJaggedTensor:
    """Draws a batch for a rank and step. Ids of the hash table are any int64."""
    generator = torch.Generator().manual_seed(seed + 1000 * step + rank)
    lengths = torch.randint(0, 4, (3 * BATCH,), generator=generator)
    counts = [int(part.sum()) for part in lengths.split(BATCH)]
    spread = torch.randint(-(2**63), 2**63 - 1, (ids,), generator=torch.Generator().manual_seed(1))
    values = [spread[torch.randint(0, ids, (counts[0],), generator=generator)]]
    values += [torch.randint(0, 64, (n,), generator=generator) for n in counts[1:]]
    return KeyedJaggedTensor(keys=list(KERNELS), values=torch.cat(values), lengths=lengths.int())


def model_contents(model: Any) -> dict[str, dict[int, dict[str, list[float]]]]:
    """Returns ids, rows, states, scores and last steps of this rank's hash tables, by the key of a
    shard."""
    found = {}
    for key, lookup in local_tables(model).items():
        if not hasattr(lookup, "_group"):
            continue
        if not key.startswith("hash"):
            continue
        state = lookup._group.export_table(lookup._index[key])
        slots = state.occupied.nonzero().flatten()
        scores = state.scores[slots].tolist() if state.scores.numel() else [0] * len(slots)
        found[key] = {
            id_: {"row": row, "state": row_state, "score": score, "step": step}
            for id_, row, row_state, score, step in zip(
                state.ids[slots].tolist(),
                state.rows[slots].float().tolist(),
                state.states[slots].tolist() if state.states.numel() else [[]] * len(slots),
                scores,
                state.last_steps[slots].tolist(),
                strict=True,
            )
        }
    return found
