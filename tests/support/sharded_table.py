"""A sharded table on simulated ranks, with its contents as a dictionary."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec, Uniform
from torchrec_hkv.hash_table.files.manifest import OWNERS
from torchrec_hkv.hash_table.routing import owner_rank

DIM = 3
# Powers of two: products with them are exact, so that each update rounds once.
RATE, MOMENTUM = np.float32(0.5), np.float32(0.25)
#: By id: bits of row and velocity, last step and count.
State = dict[int, tuple[bytes, bytes, int, int]]


class Shards:
    """The shards of a table on simulated ranks."""

    def __init__(self, world_size: int, rows: int, eviction: str, **options: object) -> None:
        self.rows, self.eviction = rows, eviction
        self.owners = [
            (-(-rank * OWNERS // world_size), -(-(rank + 1) * OWNERS // world_size))
            for rank in range(world_size)
        ]
        spec = TableSpec(
            "t", -(-rows // world_size), DIM, eviction, initializer=Uniform(-1, 1), **options
        )
        self.groups = [TableGroup([spec], [0], SGD(momentum=float(MOMENTUM))) for _ in self.owners]

    def split(self, ids: list[int]) -> Iterator[tuple[TableGroup, torch.Tensor, torch.Tensor]]:
        """Yields each shard's group, its ids, and their positions in the list."""
        tensor = torch.tensor(ids, dtype=torch.int64)
        owner = owner_rank(tensor, OWNERS)
        for group, (begin, end) in zip(self.groups, self.owners, strict=True):
            at = ((owner >= begin) & (owner < end)).nonzero().flatten()
            yield group, tensor[at], at

    def state(self) -> State:
        """Returns the contents of all shards."""
        found: State = {}
        for group in self.groups:
            state = group.export_table(0)
            slots = state.occupied.nonzero().flatten()
            rows, velocities = state.rows[slots].numpy(), state.states[slots].numpy()
            steps = state.last_steps[slots].tolist()
            counts = state.scores[slots].tolist() if state.scores.numel() else [0] * len(slots)
            for i, id_ in enumerate(state.ids[slots].tolist()):
                assert id_ not in found
                found[id_] = (rows[i].tobytes(), velocities[i].tobytes(), steps[i], counts[i])
        return found
