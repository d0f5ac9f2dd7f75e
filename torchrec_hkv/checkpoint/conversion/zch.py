"""Reads which row TorchRec's managed collision modules (zero collision hashing, ZCH) assigned to
each id."""

from __future__ import annotations

import dataclasses
import re

import torch
from torch import Tensor

from torchrec_hkv.checkpoint.conversion.dcp_tensors import DcpFolder

_MODULES = "_managed_collision_collection._managed_collision_modules."
_SORTED = "_mch_sorted_raw_ids"
_ROWS = "_mch_remapped_ids_mapping"
_COUNTS = "_mch_counts"
_LAST = "_mch_last_access_iter"
_IDENTITIES = "_hash_zch_identities"
#: Values that mark a missing id.
_NO_RAW_ID = torch.iinfo(torch.int64).max
_NO_IDENTITY = -1
_KEY = re.compile(
    rf"(?P<prefix>.*){re.escape(_MODULES)}(?P<own>[^.]+)\.(?:{_SORTED}|{_IDENTITIES})"
)


@dataclasses.dataclass(frozen=True)
class Remapping:
    """The managed collision module of a table, which assigns its rows to ids.

    Attributes:
        table: full name of the table without the module.
        folder: the folder of the tensors.
        entries: full names of all entries of the module.
        begin: prefix of the names of its tensors.
    """

    table: str
    folder: DcpFolder
    entries: list[str]
    begin: str

    def _has(self, name: str) -> bool:
        return self.begin + name in self.entries

    @property
    def counts(self) -> str | None:
        """Name of the tensor with counts of lookups; None if there is none."""
        return self.begin + _COUNTS if self._has(_COUNTS) else None

    @property
    def last_steps(self) -> str | None:
        """Name of the tensor with the steps of last lookups; None if there is none."""
        return self.begin + _LAST if self._has(_LAST) else None

    def clock(self) -> int:
        """The step of the last lookup; 0 if steps are not known."""
        if self.last_steps is None:
            return 0
        return max(1, int(self.folder.tensor(self.last_steps).all().max()))

    def by_row(self, rows: int, *, with_scores: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Reads the ids of rows. Takes up to 56 bytes of memory a row.

        Args:
            rows: number of rows of the table.
            with_scores: whether to read scores and last steps, too.

        Returns:
            Ids, int64 ``[rows]``; which rows have one, bool ``[rows]``; and ``scores``, int64
            ``[rows]``, and ``last_steps``, int32 ``[rows]``, if the module has them.

        Raises:
            ValueError: a row number is out of range, or a row has two ids.
        """
        ids, has_id = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.bool)
        if self._has(_IDENTITIES):
            identities = self.folder.tensor(self.begin + _IDENTITIES).all().flatten()
            there = (identities != _NO_IDENTITY).nonzero().flatten()
            numbers, raw, place = there, identities[there], there
        else:
            raw = self.folder.tensor(self.begin + _SORTED).all()
            place = (raw != _NO_RAW_ID).nonzero().flatten()
            raw = raw[place]
            numbers = self.folder.tensor(self.begin + _ROWS).all()[place]
        if len(numbers) and not (int(numbers.min()) >= 0 and int(numbers.max()) < rows):
            raise ValueError(
                f"Ids of table {self.table!r} have rows {int(numbers.min())} to "
                f"{int(numbers.max())}, but the table has rows 0 to {rows - 1}."
            )
        ids[numbers], has_id[numbers] = raw, True
        if int(has_id.sum()) != len(numbers):
            raise ValueError(f"Two ids of table {self.table!r} have the same row.")
        extra = {}
        if with_scores and self.counts is not None:
            extra["scores"] = self._spread(self.counts, place, numbers, rows)
        if with_scores and self.last_steps is not None:
            steps = self._spread(self.last_steps, place, numbers, rows)
            extra["last_steps"] = steps.clamp(0, (1 << 31) - 1).int()
        return ids, has_id, extra

    def _spread(self, key: str, place: Tensor, numbers: Tensor, rows: int) -> Tensor:
        spread = torch.zeros(rows, dtype=torch.int64)
        spread[numbers] = self.folder.tensor(key).all().flatten()[place].long()
        return spread


def find_remappings(folder: DcpFolder, model: str) -> dict[str, Remapping]:
    """Finds the managed collision modules of a folder, by the full names of their tables' weights.

    Args:
        folder: the folder to read.
        model: prefix of the names of the model's entries.

    Raises:
        ValueError: the table of a module is missing.
    """
    found = {}
    for key in folder.entries:
        match = _KEY.fullmatch(key)
        if match is None or not key.startswith(model):
            continue
        tensor_name, prefix = match["own"], match["prefix"]
        kinds = ("embedding_bags", "embeddings")
        weights = {kind: f"{prefix}_embedding_module.{kind}.{tensor_name}.weight" for kind in kinds}
        kind = next((kind for kind, weight in weights.items() if weight in folder.entries), None)
        if kind is None:
            raise ValueError(
                f"{folder.path} has the ids of table {tensor_name!r}, {key!r}, but not its rows, "
                f"{weights['embedding_bags']!r}."
            )
        begin = f"{prefix}{_MODULES}{tensor_name}."
        entries = [name for name in folder.entries if name.startswith(begin)]
        table = f"{prefix.removeprefix(model)}{kind}.{tensor_name}"
        found[weights[kind]] = Remapping(table, folder, entries, begin)
    return found
