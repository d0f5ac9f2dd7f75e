"""A snapshot of slots finds all changes since, whatever made them, as reads of all slots do."""

from __future__ import annotations

import random

import pytest
import torch

from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec
from torchrec_hkv.hash_table.files.file_target import FileTarget
from torchrec_hkv.hash_table.slot_snapshot import SlotSnapshot


class _Followed:
    """A table that changes at random, and its slots at the last comparison."""

    def __init__(self, seed: int, device: str, batch: int) -> None:
        self.random, self.device, self.batch = random.Random(seed), device, batch
        torch.manual_seed(seed)
        self.pool = torch.randint(-(2**63), 2**63 - 1, (900,)).to(device)
        initial = self.random.choice((None, 60))
        policy = self.random.choice(("lru", "lfu"))
        other = TableSpec("other", 100, 2)
        self.table = self.random.randrange(2)
        specs = [TableSpec("t", 600, 3, policy, initial_capacity=initial)]
        specs.insert(1 - self.table, other)
        self.group = TableGroup(specs, [0, 1], SGD(), device)
        self.snapshot = SlotSnapshot(self.group, self.table)
        self.snapshot.take(batch)
        self.before = self.held()
        self.touched: set[int] = set()
        self.noted: set[int] = set()
        self.since = self.group.first_open_step

    def held(self) -> dict[int, int]:
        """Ids by slot, from an export, for the present slots."""
        state = self.group.export_table(self.table)
        occupied = state.occupied.nonzero().flatten()
        return dict(zip(occupied.tolist(), state.ids[occupied].tolist(), strict=True))

    def some(self, n: int) -> torch.Tensor:
        return self.pool[torch.randint(0, len(self.pool), (n,)).to(self.device)].unique()

    def offsets(self, n: int) -> torch.Tensor:
        ends = [0, 0, n] if self.table else [0, n, n]
        return torch.tensor(ends, device=self.device)

    def look_up(self) -> None:
        ids = self.some(self.random.choice((1, 20, 200)))
        self.group.find_or_insert(ids, self.offsets(len(ids)), 1)
        self.touched |= set(ids.tolist())

    def erase(self) -> None:
        ids = self.some(30)
        self.group.erase(ids, self.offsets(len(ids)), 1)

    def restore(self) -> None:
        """Puts entries of an early step into the table, like a sync."""
        ids = self.some(20)
        ids = ids[self.group.find(ids, self.offsets(len(ids)), 1) < 0]
        if len(ids) == 0:
            return
        batch = {
            "ids": ids,
            "rows": torch.zeros(len(ids), 3, device=self.device),
            "last_steps": torch.zeros(len(ids), dtype=torch.int32, device=self.device),
        }
        if self.group.tables[self.table].eviction == "lfu":
            batch["scores"] = torch.ones_like(ids)
        FileTarget(self.group, self.table, 1 << 20).restore(batch, exact=False)

    def note(self) -> None:
        """Records that an entry changed."""
        held = self.held()
        if held and len(self.snapshot.ids) == self.group.present_slots(self.table):
            self.noted.add(self.random.choice(sorted(held)))

    def compare(self) -> None:
        now, before = self.held(), self.before
        noted = torch.tensor(sorted(self.noted), dtype=torch.int64)
        found = list(self.snapshot.compare(self.since, self.batch, noted))
        marked = self.touched | {now[slot] for slot in self.noted if slot in now}
        expected = {
            slot: (id_, id_ in marked, before.get(slot) == id_)
            for slot, id_ in now.items()
            if id_ in marked or before.get(slot) != id_
        }
        slots = torch.cat([part.slots for part in found]).tolist()
        values = [
            torch.cat([getattr(part, name) for part in found]).tolist()
            for name in ("ids", "touched", "same_id")
        ]
        assert slots == sorted(expected)
        assert list(zip(*values, strict=True)) == [expected[slot] for slot in slots]
        removed = {slot: id_ for slot, id_ in before.items() if now.get(slot) != id_}
        gone_slots = torch.cat([part.vacated_slots for part in found]).tolist()
        gone_ids = torch.cat([part.previous_ids for part in found]).tolist()
        assert gone_slots == sorted(removed)
        assert gone_ids == [removed[slot] for slot in gone_slots]
        assert self.snapshot.entries == len(now)
        self.before, self.touched, self.noted = now, set(), set()
        self.since = self.group.first_open_step


def _run(seed: int, device: str) -> None:
    followed = _Followed(seed, device, batch=random.Random(seed).choice((50, 1 << 20)))
    changes = (followed.look_up, followed.look_up, followed.erase, followed.restore, followed.note)
    for _ in range(8):
        for _ in range(followed.random.choice((0, 1, 3))):
            followed.random.choice(changes)()
        followed.compare()


@pytest.mark.parametrize("seed", range(40))
def test_what_changed(seed):
    _run(seed, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_what_changed_on_a_gpu(seed):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    _run(seed, "cuda")
