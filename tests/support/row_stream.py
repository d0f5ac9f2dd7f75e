"""A Python model of tables in training: the ids and their rows.

It shares no code with the tables. An id has left when a later call assigns its slot to another id.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.support.initial_value import initial_value
from torchrec_hkv.hash_table import TableSpec

Key = tuple[int, int]  # a table and an id


class RowStream:
    """Rows trained with SGD or row-wise Adagrad.

    Args:
        specs: specs of the tables.
        learning_rate: learning rate of all steps.
        eps: eps of row-wise Adagrad; None for SGD, whose rows are float32 and rounded once per
            step.
    """

    def __init__(
        self, specs: Sequence[TableSpec], learning_rate: float, eps: float | None = None
    ) -> None:
        self._specs = specs
        self._learning_rate = learning_rate
        self._eps = eps
        self._dtype = torch.float32 if eps is None else torch.float64
        self._holders: dict[int, Key] = {}  # keys by slot
        self._waiting: list[set[Key]] = []  # keys of batches that were found but not trained
        self.rows: dict[Key, Tensor] = {}
        self.squares: dict[Key, float] = {}
        self.inserted = self.evicted = self.refused = 0  # refused counts positions

        self._initial = functools.cache(self._draw)

    def _draw(self, key: Key) -> Tensor:
        """Computes the initial row of a table's id."""
        table, id_ = key
        spec = self._specs[table]
        row = [
            initial_value(id_, column, spec.name, spec.seed, spec.initializer)
            for column in range(spec.dim)
        ]
        return torch.tensor(row, dtype=torch.float32).to(self._dtype)

    def find_or_insert(self, keys: Sequence[Key], slots: Sequence[int]) -> None:
        """Applies a call, given the keys of its positions and their slots."""
        batch = set(keys)
        pinned = set().union(batch, *self._waiting)
        slot_of: dict[Key, int] = {}
        for key, slot in zip(keys, slots, strict=True):
            assert slot_of.setdefault(key, slot) == slot, f"{key} has two slots"
        self.refused += sum(slot < 0 for slot in slots)
        new = []
        for key, slot in slot_of.items():
            if slot < 0:
                assert key not in self.rows, f"{key} has a row and was not found"
                continue
            holder = self._holders.get(slot)
            if holder == key:
                continue
            assert key not in self.rows, f"{key} has two slots"
            if holder is not None:
                assert holder not in pinned, f"{holder} left, which is needed"
                del self.rows[holder], self.squares[holder]
                self.evicted += 1
            self._holders[slot] = key
            new.append(key)
        self.inserted += len(new)
        self.rows |= {key: self._initial(key) for key in new}
        self.squares |= dict.fromkeys(new, 0.0)
        self._waiting.append(batch)

    def pooled(self, keys: Sequence[Key], lengths: Sequence[int]) -> list[Tensor]:
        """Sums the rows of each bag in float64. A key without a row has its initial row."""
        rows = {key: self.rows.get(key, self._initial(key)) for key in set(keys)}
        sums, at = [], 0
        for length in lengths:
            bag = [rows[key].double() for key in keys[at : at + length]]
            sums.append(torch.stack(bag).sum(0) if bag else torch.zeros(0, dtype=torch.float64))
            at += length
        return sums

    def train(self, keys: Sequence[Key], gradients: Sequence[Tensor]) -> None:
        """Updates the rows of the oldest waiting batch, with a gradient per position."""
        sums: dict[Key, Tensor] = {}
        for key, gradient in zip(keys, gradients, strict=True):
            if key in self.rows:
                sums[key] = sums[key] + gradient.double() if key in sums else gradient.double()
        for key, total in sums.items():
            step = self._learning_rate
            if self._eps is not None:
                self.squares[key] += float(total.square().mean())
                step /= self.squares[key] ** 0.5 + self._eps
            self.rows[key] = self.rows[key] - (step * total).to(self._dtype)
        self._waiting.pop(0)
