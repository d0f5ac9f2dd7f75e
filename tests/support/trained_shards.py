"""A sharded table that is trained and changed, and a dictionary model.

Ranks are simulated: each shard is a separate :class:`TableGroup`, which gets the ids of its owner
buckets. The model computes rows, velocities, steps and counts with NumPy from the same ids and
gradients; only the ids that left are read from the table.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from tests.support.sharded_table import DIM, MOMENTUM, RATE, Shards, State
from torchrec_hkv.hash_table import Uniform, initial_rows


class TrainedShards:
    """A table with random properties, and its expected contents.

    Args:
        random: generator of all random choices.
    """

    def __init__(self, random: random.Random) -> None:
        self.random = random
        pick = random.choice
        self._rows = pick((40, 150, 600))
        self._eviction = pick(("lru", "lfu"))
        self._expire = pick((None, None, 4))
        self._initial = pick((None, 64)) if self._rows == 600 else None
        self._pool = [pick((random.getrandbits(64) - (1 << 63), i)) for i in range(900)]
        self._pool[:3] = -1, -(1 << 63), 0
        self.model: State = {}
        self._begin(self._make(pick((1, 2, 3))))

    def _make(self, world_size: int) -> Shards:
        options = {"expire_after": self._expire}
        if self._initial is not None:
            options["initial_capacity"] = self._initial
        return Shards(world_size, self._rows, self._eviction, **options)

    def _begin(self, shards: Shards) -> None:
        """Continues with these shards, like a new process."""
        self.shards = shards

    def check(self) -> None:
        """Checks that the table equals the dictionary."""
        assert self.shards.state() == self.model

    def train(self) -> None:
        ids = self.random.sample(self._pool[: self.random.choice((20, 200, 900))], 20)
        ids = ids[: self.random.randrange(21)]
        gradients = np.array(
            [[self.random.randrange(-8, 9) / 8 for _ in range(DIM)] for _ in ids], np.float32
        ).reshape(-1, DIM)
        before = [group.counters()[0] for group in self.shards.groups]
        for group, shard_ids, at in self.shards.split(ids):
            anchor = torch.empty(0, requires_grad=True)
            offsets = torch.arange(len(shard_ids) + 1)
            rate = torch.tensor(float(RATE))
            out = group.train_lookup(anchor, shard_ids, offsets, None, len(shard_ids), False, rate)
            out.backward(torch.from_numpy(gradients)[at])
        step = self.shards.groups[0].clock
        assert all(group.clock == step for group in self.shards.groups)
        now, size = self.shards.state(), len(self.model)
        new_rows = initial_rows(
            torch.tensor(ids, dtype=torch.int64), DIM, table="t", initializer=Uniform(-1, 1)
        ).numpy()
        for id_, gradient, row in zip(ids, gradients, new_rows, strict=True):
            old = self.model.pop(id_, None)
            if id_ not in now:
                continue
            fresh = self._trained((row.tobytes(), bytes(4 * DIM), 0, 0), gradient, step)
            self.model[id_] = fresh if old is None else self._trained(old, gradient, step)
            # The id may have expired, and returned as a new id.
            if old is not None and self._expire is not None and step - old[2] > self._expire:
                self.model[id_] = fresh if now[id_] == fresh else self.model[id_]
        self._discard(now, set(ids))
        inserted = left = 0
        for group, old in zip(self.shards.groups, before, strict=True):
            new, slots = group.counters()[0], group.full_slots(0)
            inserted += new["inserted"] - old["inserted"]
            left += sum(new[why] - old[why] for why in ("evicted", "expired"))
            # Nothing is evicted before a table is full.
            assert new["evicted"] == old["evicted"] or new["size"] + new["expired"] > 0.9 * slots
        assert len(now) == size + inserted - left

    def _trained(self, entry: tuple, gradient: np.ndarray, step: int) -> tuple:
        row, velocity = (np.frombuffer(part, np.float32) for part in entry[:2])
        velocity = velocity * MOMENTUM + gradient
        count = entry[3] + (self._eviction == "lfu")
        return (row - RATE * velocity).tobytes(), velocity.tobytes(), step, count

    def _discard(self, now: State, keep: set[int]) -> None:
        """Removes the ids that left the table; looked-up ids must not be among them."""
        for id_ in [id_ for id_ in self.model if id_ not in now]:
            assert id_ not in keep
            del self.model[id_]
        self.check()

    def expire(self) -> None:
        for group in self.shards.groups:
            group.expire()
        if self._expire is not None:
            step = self.shards.groups[0].clock
            self.model = {
                id_: entry for id_, entry in self.model.items() if step - entry[2] <= self._expire
            }
        self.check()

    def erase(self) -> None:
        ids = self.random.sample(self._pool[:200], self.random.randrange(30))
        for group, shard_ids, _ in self.shards.split(ids):
            group.erase(shard_ids, torch.tensor([0, len(shard_ids)]), 1)
        for id_ in ids:
            self.model.pop(id_, None)
        self.check()

    def assign(self) -> None:
        """Assigns rows without a lookup, to ids in the table and to others."""
        ids = self.random.sample(self._pool[:200], self.random.randrange(10))
        other_ids = sorted(self.model.keys() - set(ids))
        ids += self.random.sample(other_ids, min(len(other_ids), self.random.randrange(20)))
        rows = np.array([[self.random.random() for _ in range(DIM)] for _ in ids], np.float32)
        rows = rows.reshape(-1, DIM)
        for group, shard_ids, at in self.shards.split(ids):
            offsets = torch.tensor([0, len(shard_ids)])
            group.assign_rows(shard_ids, offsets, 1, torch.from_numpy(rows)[at])
        for id_, row in zip(ids, rows, strict=True):
            if id_ in self.model:
                self.model[id_] = (row.tobytes(), *self.model[id_][1:])
        self.check()

    def clear(self) -> None:
        for group in self.shards.groups:
            group.clear_table(0)
        self.model = {}
        self.check()

    def grow(self) -> None:
        for group in self.shards.groups:
            group.reserve(0, self.random.randrange(group.tables[0].capacity + 1))
        self.check()
