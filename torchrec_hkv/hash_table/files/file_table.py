"""A table of a group as files see it: its geometry, its fields, and how many entries fit."""

from __future__ import annotations

import torch

from torchrec_hkv import _C
from torchrec_hkv.hash_table.files.shard_files import entry_bytes, fields_of
from torchrec_hkv.hash_table.groups.table_group import TableGroup


class FileTable:
    """A table of a group that is saved or loaded."""

    def __init__(self, group: TableGroup, table: int, batch_bytes: int) -> None:
        self.group = group
        self.table = table
        self.name = group.tables[table].name
        layout = _C.table_layout(group.handle, table)
        *self._layout, self.keeps_scores, self.buckets, self.bucket_slots = layout
        self.fields = fields_of(*self._layout, self.keeps_scores)
        #: Whether the table stores rows as codes of 8 bits, so that files do, too.
        self.is_int8 = self._layout[1] == torch.int8
        self.slots = self.buckets * self.bucket_slots
        self._batch_bytes = batch_bytes

    def _entries(self, parts: int) -> int:
        """Number of entries that fit into one of ``parts`` parts of the memory."""
        return max(1, self._batch_bytes // (parts * entry_bytes(self.fields)))
