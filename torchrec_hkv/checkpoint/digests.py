"""Digests of the tables of a sharded model: to compare what two models hold."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from torchrec_hkv.collective import on_every_rank
from torchrec_hkv.sharding.state.names import named_tables


def digest(model: nn.Module) -> dict[str, str]:
    """A digest of each hash table's ids, rows, optimizer states, scores and last steps.

    It is the same for the same entries, however a table is sharded and in whatever order its ids
    came; a single bit of one value makes another. It tells chance from equality, not forgery. A
    collective call that waits for the device. In a ``DMPCollection`` it is of the first replica.

    Args:
        model: sharded.

    Returns:
        By the full name of a table, such as ``"ebc.embedding_bags.user"``: the number of its
        entries, ``-``, and 16 hexadecimal digits. Tables that are in the ``state_dict``, as those
        with rows by number, have none.
    """
    parts = on_every_rank(lambda: _local(model))
    sums: dict[str, list[int]] = {}
    for part in parts:
        for name, (entries, value) in part.items():
            total = sums.setdefault(name, [0, 0])
            total[0] += entries
            total[1] += value
    return {name: f"{entries}-{value % (1 << 64):016x}" for name, (entries, value) in sums.items()}


def _local(model: nn.Module) -> dict[str, tuple[int, int]]:
    """This rank's part, by full name."""
    sums: dict[str, tuple[int, int]] = {}
    for name, table in named_tables(model).items():
        if not table.has_files or not table.collection.is_first_replica:
            continue
        lookups = table.collection.group_lookups()
        keys = table.state.keys_on(dist.get_rank())
        mine = [lookups[key].digest(key) for key in keys]
        sums[name] = (sum(m[0] for m in mine), sum(m[1] for m in mine))
    return sums
