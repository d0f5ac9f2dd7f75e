"""Random calls on a CheckedTable."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.batches import INT64_MAX, INT64_MIN
from tests.support.checked_table import CheckedTable
from tests.support.table_model import TAKES_SCORES
from tests.support.table_observation import Row
from torchrec_hkv.hash_table import EvictionPolicy

CALLS = [
    "find",
    "find_or_insert",
    "find_or_insert_slots",
    "insert_or_assign",
    "insert_and_evict",
    "insert_and_evict",
    "accum_or_assign",
    "assign",
    "assign_rows",
    "assign_scores",
    "erase",
    "select",
    "next_epoch",
    "expire",
]


class Driver:
    """Generates calls.

    Args:
        checked: the table.
        policy: the table's policy.
        capacity: the table's capacity.
        seed: seed of the calls.
        batch: largest number of ids of a call, before some are repeated.
        calls: names to choose from: those of :data:`CALLS`, ``"clear"`` and ``"reload"``.
        folder: folder for ``"reload"``.

    Attributes:
        number: number of calls made.
        operations: total number of ids of the calls.
    """

    def __init__(
        self,
        checked: CheckedTable,
        policy: EvictionPolicy,
        capacity: int,
        seed: int,
        batch: int | None = None,
        calls: list[str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.checked = checked
        self.policy = policy
        self.batch = max(3, capacity // 3) if batch is None else batch
        self.calls = CALLS if calls is None else calls
        self.folder = folder
        self.number = self.operations = 0
        others = [self.random.randint(INT64_MIN, INT64_MAX) for _ in range(capacity)]
        self.pool = [*range(-capacity // 2, capacity), INT64_MIN, INT64_MAX, *others]

    def ids(self) -> list[int]:
        ids = self.random.choices(self.pool, k=self.random.randint(0, self.batch))
        return ids + ids[: self.random.choice([0, 0, 1, 50])]

    def scores(self, ids: list[int]) -> list[int] | None:
        if self.policy not in TAKES_SCORES:
            return None
        if self.policy != "customized":
            return None if self.random.random() < 0.5 else [self.random.randint(0, 4) for _ in ids]
        return [self.random.choice([self.random.randint(-9, 99), -(2**63) + 5]) for _ in ids]

    def rows(self, ids: list[int]) -> list[Row]:
        return [(float(self.random.randint(-99, 99)), float(at % 251)) for at in range(len(ids))]

    def call(self) -> None:
        name = self.random.choice(self.calls)
        checked, ids = self.checked, self.ids()
        self.number += 1
        if name == "erase":
            ids = ids[: self.random.choice([20, 20, 20, len(ids)])]
            checked.erase(ids)
        elif name == "find":
            checked.find(ids)
        elif name in ("find_or_insert", "find_or_insert_slots", "assign_scores"):
            getattr(checked, name)(ids, self.scores(ids))
        elif name in ("insert_or_assign", "insert_and_evict", "assign"):
            getattr(checked, name)(ids, self.rows(ids), self.scores(ids))
        elif name == "assign_rows":
            checked.assign_rows(ids, self.rows(ids))
        elif name == "accum_or_assign":
            ids = list(dict.fromkeys(ids))
            beliefs = [
                (id_ in checked.model.entries) != (self.random.random() < 0.1) for id_ in ids
            ]
            checked.accum_or_assign(ids, self.rows(ids), beliefs, self.scores(ids))
        else:
            self._call_without_ids(name)
            ids = []
        self.operations += len(ids)

    def _call_without_ids(self, name: str) -> None:
        checked = self.checked
        if name == "select":
            scores = sorted(entry.score for entry in checked.model.entries.values()) or [0]
            low = scores[len(scores) // 20]
            checked.export_if(1 + self.random.randrange(2 * self.batch), score_at_least=low)
            checked.export_if(11 + self.batch // 5, score_at_least=low, older_than=1)
            checked.erase_if(score_below=low, older_than=2)
        elif name == "next_epoch" and self.policy in ("epoch_lru", "epoch_lfu"):
            checked.next_epoch()
        elif name == "expire":
            if checked.model.expire_after is not None:
                checked.expire()
        elif name == "clear":
            checked.clear()
        elif name == "reload":
            checked.reload(self.folder)
