"""Tables that change randomly in every way, and their contents as dictionaries."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from torchrec_hkv.hash_table import (
    SGD,
    Adagrad,
    Adam,
    AgedLFU,
    MinFrequency,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
    files,
)
from torchrec_hkv.hash_table.files.changes import ChangeTracker
from torchrec_hkv.hash_table.files.manifest import Manifest

POLICIES = ("lru", "lfu", "adaptive", AgedLFU(0.5), "epoch_lru", "epoch_lfu", "customized")
#: By id: slot, last step, score, and the bits of row and states.
TableContents = dict[int, tuple[int, int, int, tuple[int, ...], tuple[int, ...]]]


def table_contents(group: TableGroup, table: int) -> TableContents:
    """Returns a table's whole contents by id."""
    state = group.export_table(table)
    slots = state.occupied.nonzero().flatten().cpu()
    bits = torch.int32 if state.rows.dtype == torch.float32 else torch.int16
    rows = state.rows.cpu()[slots].view(bits).tolist()
    states = state.states.cpu()[slots]
    states = states.view(torch.int32).tolist() if states.numel() else [[]] * len(slots)
    steps = state.last_steps.cpu()[slots].tolist()
    scores = state.scores.cpu()[slots].tolist() if state.scores.numel() else [0] * len(slots)
    return {
        id_: (slot, steps[i], scores[i], tuple(rows[i]), tuple(states[i]))
        for i, (slot, id_) in enumerate(
            zip(slots.tolist(), state.ids.cpu()[slots].tolist(), strict=True)
        )
    }


class Changing:
    """A group of two tables that changes by random operations.

    Args:
        seed: seed of all random choices.
        device: device of the tables.
        folder: folder for saves that operations load.
    """

    def __init__(self, seed: int, device: str, folder: Path) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self._folder = device, folder
        pick = self.random.choice
        self.optimizer = pick((None, SGD(), Adagrad(), RowWiseAdagrad(), Adam()))
        self.dtype = pick((torch.float32, torch.float32, torch.bfloat16))
        self.specs = [self._spec(name) for name in ("a", "b")]
        self.group = self.make()
        self.ids = [self._draw_ids() for _ in self.specs]
        self._pending: list[torch.Tensor] = []
        self._saved: Path | None = None

    def _spec(self, name: str) -> TableSpec:
        pick = self.random.choice
        capacity = pick((20, 64, 150, 700))
        grows = capacity == 700 and pick((True, False))
        dim = pick((3, 8))
        eviction = pick(POLICIES)
        tier: dict[str, Any] = {}
        if self.device == "cuda" and not grows and pick((True, False)):
            tier = {"hbm_bytes": 64 * 1024}
        return TableSpec(
            name,
            capacity,
            dim,
            eviction,
            initializer=Uniform(-1, 1),
            dtype=self.dtype,
            initial_capacity=64 if grows else None,
            expire_after=pick((None, None, 1, 5)),
            admission=pick((None, None, MinFrequency(2, entries=256))),
            **tier,
        )

    def make(self) -> TableGroup:
        """Creates an empty group with the same tables."""
        return TableGroup(self.specs, [0, 1], self.optimizer, self.device)

    def _draw_ids(self) -> torch.Tensor:
        n = self.random.choice((30, 200, 1000))
        ids = torch.randint(-(2**63), 2**63 - 1, (n,), generator=self.generator)
        ids[:3] = torch.tensor([-1, -(2**63), 0])
        return ids

    def _call(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws ids of both tables, and offsets by table."""
        counts = [self.random.choice((0, 1, 7, 40)) for _ in self.specs]
        ids = [
            table_ids[torch.randint(0, len(table_ids), (n,), generator=self.generator)]
            for table_ids, n in zip(self.ids, counts, strict=True)
        ]
        offsets = torch.tensor([0, counts[0], sum(counts)])
        return torch.cat(ids).to(self.device), offsets.to(self.device)

    def _rows(self, n: int) -> torch.Tensor:
        rows = torch.randn(n, self.group.row_width, generator=self.generator)
        return rows.to(self.group.row_dtype).to(self.device)

    def _scores(self, n: int) -> torch.Tensor | None:
        if not any(s.eviction in ("lfu", "epoch_lfu", "customized") for s in self.specs):
            return None
        return torch.randint(0, 50, (n,), generator=self.generator).to(self.device)

    def change(self) -> str:
        """Runs one operation; returns its name."""
        names = ["train"] * 6 + [
            "forward",
            "backward",
            "insert",
            "assign",
            "assign_rows",
            "assign_scores",
            "accumulate",
            "erase",
            "erase_if",
            "expire",
            "epoch",
            "clear",
            "save",
            "load",
        ]
        name = self.random.choice(names)
        getattr(self, f"_{name}")()
        return name

    def _train(self) -> None:
        self._forward()
        self._backward()

    def _forward(self) -> None:
        """Runs a training lookup whose backward may run much later, or never."""
        ids, offsets = self._call()
        if self.optimizer is None or any(s.eviction == "customized" for s in self.specs):
            self.group.find_or_insert_slots(ids, offsets, 1, self._scores(ids.numel()))
            return
        anchor = torch.empty(0, device=self.device, requires_grad=True)
        rate = torch.full((), 0.1, device=self.device)
        out = self.group.train_lookup(anchor, ids, offsets, None, 1, False, rate)
        self._pending.append(out)
        if len(self._pending) > 4:
            self._pending.pop(0)

    def _backward(self) -> None:
        if self._pending:
            out = self._pending.pop(self.random.randrange(len(self._pending)))
            out.backward(torch.randn(out.shape, generator=self.generator).to(out))

    def _insert(self) -> None:
        ids, offsets = self._call()
        n = ids.numel()
        self.group.insert_or_assign(ids, offsets, 1, self._rows(n), self._scores(n))

    def _assign(self) -> None:
        ids, offsets = self._call()
        n = ids.numel()
        self.group.assign(ids, offsets, 1, self._rows(n), self._scores(n))

    def _assign_rows(self) -> None:
        ids, offsets = self._call()
        self.group.assign_rows(ids, offsets, 1, self._rows(ids.numel()))

    def _assign_scores(self) -> None:
        ids, offsets = self._call()
        self.group.assign_scores(ids, offsets, 1, self._scores(ids.numel()))

    def _accumulate(self) -> None:
        ids, offsets = self._call()
        there = self.group.contains(ids, offsets, 1)
        n = ids.numel()
        self.group.accum_or_assign(ids, offsets, 1, self._rows(n), there, self._scores(n))

    def _erase(self) -> None:
        ids, offsets = self._call()
        self.group.erase(ids, offsets, 1)

    def _erase_if(self) -> None:
        self.group.erase_if(older_than=self.random.choice((2, 10)))

    def _expire(self) -> None:
        self.group.expire()

    def _epoch(self) -> None:
        self.group.set_epoch(self.group._epoch + 1)

    def _clear(self) -> None:
        if self.random.random() < 0.3:
            self._pending.clear()
            self.group.clear_table(self.random.randrange(2))

    def _save(self) -> None:
        self._saved = self._folder / f"saved-{self.random.getrandbits(40):x}"
        files.save(self.group, 0, self._saved)

    def _load(self) -> None:
        if self._saved is not None:
            self._pending.clear()  # a table with a pending backward can't be loaded
            files.load(self.group, 0, self._saved, allow_loss=True)


class Written:
    """Writes a table's base and deltas.

    Args:
        group: the table's group.
        table: index of the table in the group.
        folder: folder for all writes.
    """

    def __init__(self, group: TableGroup, table: int, folder: Path) -> None:
        self.group, self.table, self._folder = group, table, folder
        self.tracker = ChangeTracker(group, table)
        self.folders: list[Path] = []
        self.states: list[TableContents] = []

    def write(self) -> Manifest:
        """Writes the base or the next delta."""
        folder = self._folder / f"{len(self.folders):03d}"
        # Small files and batches, so that there are several of each.
        sizes = {"batch_bytes": 4096, "shard_bytes": 2048}
        files.save(self.group, self.table, folder, tracker=self.tracker, **sizes)
        self.folders.append(folder)
        self.states.append(table_contents(self.group, self.table))
        return Manifest.read(folder)

    def layers(self, last: int) -> list[tuple[Path, Manifest]]:
        """Returns the writes that form the table at a write, the newest first."""
        layers = []
        for folder in reversed(self.folders[: last + 1]):
            manifest = Manifest.read(folder)
            layers.append((folder, manifest))
            if manifest.changes is None:
                break
        return layers
