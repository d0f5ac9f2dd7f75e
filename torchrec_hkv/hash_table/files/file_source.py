"""A table that is saved: its entries in slot order, in batches of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from torchrec_hkv.hash_table.files.file_table import FileTable
from torchrec_hkv.hash_table.files.manifest import OWNERS, Reduced
from torchrec_hkv.hash_table.files.shard_files import Staging, entry_bytes, fields_of, quantised
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.routing import owner_rank
from torchrec_hkv.hash_table.stored_rows import int8_parts
from torchrec_hkv.write_behind import SaveHandle

# A save uses half of its memory for staging, a quarter to scan for entries, and two of this many
# parts for each batch that is read from the table.
SAVED_PARTS = 8
# A non-blocking save copies pieces. A piece takes one of _PIECES parts of the memory limit, or
# _DEVICE_PIECE bytes of a GPU's memory. For each piece the host waits for the GPU twice and
# allocates GPU memory.
_PIECES, _DEVICE_PIECE = 4, 1 << 30
# Bytes for each slot: of the search for a shard's entries, and of counting.
_SCAN_BYTES, _COUNT_BYTES = 32, 24

_ops = torch.ops.torchrec_hkv


class FileSource(FileTable):
    """A table that is saved.

    Args:
        group: the group of the table.
        table: index of the table in the group.
        batch_bytes: memory limit in bytes.
        only: int64, ascending, on the CPU: slots whose entries are saved; None for all.
        reduced: the reduced form in which entries are saved; None to save them completely.
    """

    def __init__(
        self,
        group: TableGroup,
        table: int,
        batch_bytes: int,
        only: Tensor | None = None,
        reduced: Reduced | None = None,
    ) -> None:
        super().__init__(group, table, batch_bytes)
        self._only = only
        if reduced is not None:
            dim, _, state_dim = self._layout
            dtype = getattr(torch, reduced.dtype)
            state_dim = state_dim if reduced.states else 0
            self.fields = fields_of(dim, dtype, state_dim, self.keeps_scores)

    def _owners(self, maximum: int) -> Iterator[tuple[int | Tensor, Tensor]]:
        """Yields pairs for at most ``maximum`` slots at a time: the first slot (all of these slots
        if only some slots are saved), and the owner bucket of each slot, -1 for free slots."""
        total = self.slots if self._only is None else len(self._only)
        for first in range(0, total, maximum):
            slots, owners = self._owners_of(first, min(maximum, total - first))
            yield first if slots is None else slots, owners

    def _owners_of(self, first: int, n: int) -> tuple[Tensor | None, Tensor]:
        """Owner buckets of ``n`` slots from ``first`` on. If only some slots are saved, counts
        those only, and returns the slots, too."""
        group, table = self.group, self.table
        if self._only is None:
            return None, _ops.slot_owners(group.counter_tensor, group.handle, table, first, n)
        slots = self._only[first : first + n].to(group.device)
        ids, _ = group.ids_and_steps(table, slots)
        return slots, owner_rank(ids, OWNERS)

    def count_owners(self) -> Tensor:
        """Number of entries of each owner bucket, int64 ``[65536]``."""
        counts = torch.zeros(OWNERS + 1, dtype=torch.int64, device=self.group.device)
        # No batch has memory yet, so counting may take the whole limit.
        for _, owners in self._owners(max(1, self._batch_bytes // _COUNT_BYTES)):
            counts += torch.bincount(owners.add_(1), minlength=OWNERS + 1)
        return counts[1:].cpu()

    def staging(self, parts: int = 2) -> Staging:
        """Memory for a batch that is being written: one of ``parts`` parts of the memory limit."""
        return Staging(self.fields, self._entries(parts), pin=self.group.device.type == "cuda")

    def pieces(
        self, ranges: Sequence[tuple[int, int]], handle: SaveHandle
    ) -> Iterator[tuple[dict[str, Tensor], list[int], bool]]:
        """Copies all entries in pieces, when the memory of a non-blocking save has room.

        Args:
            ranges: ascending and disjoint ranges of owner buckets that hold all entries.
            handle: handle of the save.

        Yields:
            Entries ordered by range, then by slot; the number of entries of each range; and whether
            the copies are in the GPU's memory instead of the host's.
        """
        device = self.group.device
        entry = entry_bytes(self.fields)
        small = self._entries(_PIECES)
        piece = max(small, _DEVICE_PIECE // entry) if device.type == "cuda" else small
        # The range of each owner bucket; -1, the owner of free slots, comes first.
        number_of = torch.full((OWNERS + 1,), -1, dtype=torch.int32)
        for number, (begin, end) in enumerate(ranges):
            number_of[begin + 1 : end + 1] = number
        number_of = number_of.to(device)
        total, first = self.slots if self._only is None else len(self._only), 0
        while first < total:
            n = min(piece, total - first)
            slots, owners = self._owners_of(first, n)
            numbers = number_of.index_select(0, owners + 1)
            if slots is None:
                slots = (numbers >= 0).nonzero().flatten()
                numbers = numbers.index_select(0, slots)
                slots += first
            size = len(slots) * entry
            on_device = device.type == "cuda" and handle.reserve_on_device(size, device)
            if not on_device:
                if n > small:
                    piece = small
                    continue
                handle.reserve(size)
            if len(ranges) > 1:
                slots = slots.index_select(0, _stable_order(numbers, len(ranges)))
            batch = self._read(slots)
            if device.type == "cuda" and not on_device:
                batch = {name: _pinned_copy(tensor) for name, tensor in batch.items()}
            yield batch, torch.bincount(numbers, minlength=len(ranges)).tolist(), on_device
            first += n

    def batches(self, begin: int, end: int) -> Iterator[dict[str, Tensor]]:
        """Entries of a range of owner buckets in slot order, on the table's device."""
        size = self._entries(SAVED_PARTS)
        for slots in self._slots(begin, end):
            for part in slots.split(size) if slots.numel() else ():
                yield self._read(part)

    def _slots(self, begin: int, end: int) -> Iterator[Tensor]:
        for slots, owners in self._owners(max(1, self._batch_bytes // (4 * _SCAN_BYTES))):
            chosen = ((owners >= begin) & (owners < end)).nonzero().flatten()
            yield slots[chosen] if isinstance(slots, Tensor) else chosen + slots

    def _read(self, slots: Tensor) -> dict[str, Tensor]:
        names = ("ids", "rows", "last_steps", "scores", "states")
        read = _ops.read_slots(self.group.handle, self.table, slots)
        batch = {"slots": slots, **dict(zip(names, read, strict=True))}
        (dtype,) = (field.dtype for field in self.fields if field.name == "rows")
        if self.is_int8:
            batch["rows"], batch["scales"] = int8_parts(batch["rows"], self._layout[0])
        elif dtype == torch.int8:
            batch["rows"], batch["scales"] = self._quantised(batch["rows"])
        else:
            batch["rows"] = self._narrowed(batch["rows"], dtype)
        return {field.name: batch[field.name] for field in self.fields}

    def _quantised(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = quantised(rows)
        if not bool(scales.isfinite().all()):
            raise ValueError(
                f"table {self.name!r} has values that are infinite or NaN, which have no codes of "
                "8 bits: save its rows as torch.bfloat16, or as they are."
            )
        return codes, scales

    def _narrowed(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if rows.dtype == dtype:
            return rows
        narrow = rows.to(dtype)
        if bool((narrow.isinf() & rows.isfinite()).any()):
            raise ValueError(
                f"table {self.name!r} has values beyond {torch.finfo(dtype).max:g}, which {dtype} "
                "can't represent: save its rows as torch.bfloat16, or with their own dtype."
            )
        return narrow


def _stable_order(numbers: Tensor, limit: int) -> Tensor:
    """Returns the stable sorting permutation of numbers below a limit."""
    if numbers.is_cuda or limit >= 1 << 15:
        return numbers.argsort(stable=True)
    # NumPy sorts 16 bits by radix, five times as fast.
    return torch.from_numpy(np.argsort(numbers.short().numpy(), kind="stable"))


def _pinned_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
