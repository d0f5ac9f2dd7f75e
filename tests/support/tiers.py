"""Tables with a part of their rows in HBM, and the rest in host memory."""

from __future__ import annotations

from torchrec_hkv.hash_table import (
    SGD,
    Optimizer,
    TableGroup,
    TableSpec,
    Uniform,
    hbm_share_for,
    table_memory,
)


def hbm_bytes_for(
    share: float, capacity: int, dim: int, state_dim: int = 0, eviction: str = "lru"
) -> int:
    """Returns the HBM for the index and this share of the rows, including the tags of their frames.

    Includes the states of all rows if that is enough for the states to stay in HBM.
    """
    memory = table_memory(capacity, dim, state_dim, eviction)
    rows = int(share * memory.num_slots)
    together = memory.index_bytes + rows * memory.row_bytes + (rows // 4 + 1) * 12
    apart = together + (memory.num_slots - rows) * memory.state_bytes
    return apart if hbm_share_for(memory, apart).all_states else together


def tiered_group(
    share: float | None,
    capacity: int = 6400,
    dim: int = 16,
    optimizer: Optimizer | None = None,
    eviction: str = "lru",
    **options: object,
) -> TableGroup:
    """Creates a table on the GPU with this share of its rows in HBM; None for all rows."""
    optimizer = SGD() if optimizer is None else optimizer
    limit = None
    if share is not None:
        limit = hbm_bytes_for(share, capacity, dim, optimizer.state_width(dim), eviction)
    spec = TableSpec("t", capacity, dim, eviction, limit, initializer=Uniform(-1, 1), **options)
    return TableGroup([spec], [0], optimizer, device="cuda")
