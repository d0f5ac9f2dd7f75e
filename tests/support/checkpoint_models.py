"""A model to save under one sharding plan and load under another, and its whole contents."""

from __future__ import annotations

from typing import Any

import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.models import local_tables, make_model, shard_model
from torchrec_hkv import HKVOptions, ParameterConstraints, TTOptions
from torchrec_hkv.hash_table import MinFrequency

ROWS, DIMS, BATCH = 640, {"lru": 12, "lfu": 8}, 8
#: Optimizer and its arguments, numbers of state values per column, and per row.
OPTIMIZERS = {
    "adam": (torch.optim.Adam, {"lr": 0.05}, 2, 0),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-6}, 1, 0),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-6}, 0, 1),
}


def make_tables(
    world_size: int,
    device: torch.device,
    sharding_type: str,
    optimizer: str = "adam",
    *,
    rows: int = ROWS,
    dims: dict[str, int] | None = None,
    admission: MinFrequency | None = None,
    kinds: dict[str, str] | None = None,
    eviction: str = "lfu",
    seed: int = 3,
    dense: bool = False,
    tt_rank: int = 4,
    tt_dtype: str = "fp32",
    hash_dtype: str = "fp32",
    expire_after: int | None = None,
    deterministic: bool = False,
) -> DistributedModelParallel:
    """Creates hash tables ``lru`` and ``lfu`` (which grows), and tables ``tt`` and ``stock``.

    Args:
        world_size: number of ranks.
        device: device of the tables.
        sharding_type: sharding type of hash tables and ``stock``.
        optimizer: a key of :data:`OPTIMIZERS`.
        rows: rows of each hash table, over all ranks.
        dims: dims of the hash tables.
        admission: admission of ``lru``.
        kinds: other kernels for some tables.
        eviction: policy of ``lfu``.
        seed: seed of ``lru``.
        dense: whether ``lru`` is in dense-compatible mode.
        tt_rank: rank of ``tt``.
        tt_dtype: dtype of ``tt``.
        hash_dtype: dtype of the hash tables; ``"int8"`` is set by options, not by configs.
        expire_after: option of ``lru``.
    """
    dims = dims or DIMS
    kernels = {"lru": "hkv", "lfu": "hkv", "tt": "tt", "stock": "fused", **(kinds or {})}
    sizes = {"lru": (rows, dims["lru"]), "lfu": (rows, dims["lfu"])}
    # Hash tables need some more slots to have room for every row.
    sizes |= {"tt": (160 if kernels["tt"] == "hkv" else 64, 8), "stock": (64, 8)}
    in_config = "fp32" if hash_dtype == "int8" else hash_dtype
    row_dtype = torch.int8 if hash_dtype == "int8" else None
    dtypes = {"lru": in_config, "lfu": in_config, "tt": tt_dtype, "stock": "fp32"}
    tables = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=n,
            embedding_dim=dim,
            feature_names=[name],
            data_type=DataType(dtypes[name].upper()),
        )
        for name, (n, dim) in sizes.items()
    ]
    options: dict[str, Any] = {
        "lru": HKVOptions(
            seed=seed,
            admission=admission,
            dense=dense,
            expire_after=expire_after,
            row_dtype=row_dtype,
            deterministic=deterministic,
        ),
        "lfu": HKVOptions(
            eviction=eviction,
            initial_capacity=128,
            row_dtype=row_dtype,
            deterministic=deterministic,
        ),
        "tt": TTOptions(ranks=tt_rank),
    }
    constraints = {
        name: ParameterConstraints(
            compute_kernels=[kernel],
            sharding_types=["table_wise" if kernel == "tt" else sharding_type],
            min_partition=4,
            options=options.get(name) if name not in (kinds or {}) else None,
        )
        for name, kernel in kernels.items()
    }
    model = make_model(tables, None)
    kind, arguments, *_ = OPTIMIZERS[optimizer]
    for name, kernel in kernels.items():
        weight = [model.ebc.embedding_bags[name].weight]
        if kernel == "fused":  # no Adam on a CPU, and row-wise states per column shard
            apply_optimizer_in_backward(torch.optim.Adagrad, weight, {"lr": 0.1, "eps": 1e-6})
        else:
            apply_optimizer_in_backward(kind, weight, dict(arguments))
    return shard_model(model, constraints, world_size, device)


def features(
    device: torch.device, seed: int, ids: int = 260, names: tuple[str, ...] = ("lru", "lfu")
) -> KeyedJaggedTensor:
    """Creates a batch: raw ids for hash tables, row numbers for other tables."""
    generator = torch.Generator().manual_seed(seed)
    keys = ["lru", "lfu", "tt", "stock"]
    lengths = torch.randint(0, 5, (len(keys) * BATCH,), generator=generator)
    values = []
    for key, n in zip(keys, lengths.view(len(keys), BATCH).sum(1).tolist(), strict=True):
        drawn = torch.randint(0, ids if key in names else 64, (n,), generator=generator)
        values.append(drawn * 0x9E3779B97F4A7C1 - 2**62 if key in names else drawn)
    return KeyedJaggedTensor(
        keys=keys, values=torch.cat(values).to(device), lengths=lengths.to(device)
    )


def train(
    model: DistributedModelParallel, rank: int, device: torch.device, steps: range
) -> torch.Tensor:
    """Trains; returns all outputs in host memory."""
    outputs = []
    for step in steps:
        output = model(features(device, 1000 * rank + step))
        output.square().sum().backward()
        outputs.append(output.detach().cpu())
    return torch.cat(outputs)


def evaluate(model: DistributedModelParallel, device: torch.device) -> torch.Tensor:
    """Returns outputs, which are the same on every rank and for every model with equal contents."""
    model.eval()
    with torch.no_grad():
        outputs = [model(features(device, 77 + step)).cpu() for step in range(4)]
    model.train()
    return torch.cat(outputs)


def model_contents(model: DistributedModelParallel, optimizer: str) -> list[tuple]:
    """All values that the hash tables of this rank hold, each with its table, id and place, sorted:
    on a GPU, ids race for slots. They are read from the tables past all that saves and loads."""
    *_, of_columns, of_rows = OPTIMIZERS[optimizer]
    values = []
    for key, lookup in local_tables(model).items():
        if not hasattr(lookup, "_group") or not hasattr(lookup._group, "sizes"):
            continue
        shard, index = lookup._shards[key], lookup._index[key]
        state = lookup._group.export_table(index)
        slots = state.occupied.nonzero().flatten()
        ids = state.ids[slots].tolist()
        rows = state.rows[slots].cpu()
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[rows.dtype.itemsize]
        rows = rows.view(bits).tolist()
        states = state.states[slots].cpu().contiguous().view(torch.int32)
        states = states.tolist() if states.numel() else [[]] * len(ids)
        steps = state.last_steps[slots].tolist()
        scores = state.scores[slots].tolist() if state.scores.numel() else [None] * len(ids)
        for i, id_ in enumerate(ids):
            if shard.column_offset == 0:
                values.append((shard.name, id_, "entry", steps[i], scores[i]))
                step = int(state.optimizer_step)
                values.append((shard.name, "all", "step", step, lookup._group.clock))
            if len(rows[i]) > shard.dim:  # the scale of an int8 row, which all columns share
                values.append((shard.name, id_, "more", *rows[i][shard.dim :]))
            for c in range(shard.dim):
                at = shard.column_offset + c
                values.append((shard.name, id_, at, "row", rows[i][c]))
                for k in range(of_columns):
                    values.append((shard.name, id_, at, k, states[i][k * shard.dim + c]))
                for k in range(of_rows):
                    value = states[i][of_columns * shard.dim + k]
                    values.append((shard.name, id_, at, "of the row", value))
    return sorted(values, key=repr)


def joined(results: list[list[tuple]]) -> list[tuple]:
    """Returns the sorted values of all ranks; values for a whole table occur once."""
    everything = [value for values in results for value in values]
    once = {value for value in everything if value[1] == "all"}
    entries = [value for value in everything if value[1] != "all"]
    assert len(set(entries)) == len(entries)
    return sorted([*once, *entries], key=repr)


def assert_same(results: list[tuple], expected: list[tuple], device_type: str) -> None:
    """Compares what ranks returned. Tensors are outputs of further steps: they are equal bit for
    bit on a CPU, while a GPU adds gradients of Tensor-Train cores in any order."""
    exact = {"rtol": 0, "atol": 0} if device_type == "cpu" else {}
    for values, others in zip(results, expected, strict=True):
        for value, other in zip(values, others, strict=True):
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, other, **exact)
            else:
                assert value == other
