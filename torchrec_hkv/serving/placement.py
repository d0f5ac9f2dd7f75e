"""Places a model's tables on a device.

A table that is larger than its HBM limit has all rows in host memory, which the GPU reads, and its
hot rows also in HBM. ``csrc/serving/hot_rows.h`` describes the hot rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchrec_hkv.serving import ops
from torchrec_hkv.serving.lookup_counts import counts_of
from torchrec_hkv.serving.tables import ReadOnlyTable, ServingHotRows
from torchrec_hkv.table_names import find_name

__all__ = ["HbmBytes", "Placement", "carried_counts", "ops", "rechoose_hot_rows", "shares"]

_ops = torch.ops.torchrec_hkv
#: Bytes of HBM for rows, of all tables together or by table.
HbmBytes = int | Mapping[str, int]
_MAX_HOT = (1 << 32) - 1
_BUCKET_IDS = 7
_BATCH_BUCKETS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Placement:
    """The placement of tables.

    Attributes:
        device: device of the tables.
        resident: whether tables in host memory are read into this process's memory instead of
            mapped.
        hbm_bytes: bytes of HBM for rows of all tables together, or by full name of a table. None,
            and tables that are not named: all rows are in HBM if ``device`` is a GPU.
    """

    device: torch.device
    resident: bool
    hbm_bytes: HbmBytes | None = None

    @classmethod
    def checked(
        cls,
        device: torch.device,
        resident: bool,
        hbm_bytes: HbmBytes | None,
        names: Sequence[str],
    ) -> Placement:
        """A placement from the arguments of :func:`torchrec_hkv.serving.load`.

        Args:
            names: full names of the model's tables.

        Raises:
            ValueError: ``hbm_bytes`` is invalid.
        """
        if hbm_bytes is None:
            return cls(device, resident)
        if device.type != "cuda":
            raise ValueError(
                f"hbm_bytes is {hbm_bytes!r}, but device is {str(device)!r}, which has no HBM: "
                "leave hbm_bytes None."
            )
        if not isinstance(hbm_bytes, Mapping):
            return cls(device, resident, _checked(hbm_bytes, "hbm_bytes"))
        by_name = {
            find_name(name, names): _checked(value, f"hbm_bytes of table {name!r}")
            for name, value in hbm_bytes.items()
        }
        return cls(device, resident, by_name)

    def place(
        self,
        tables: Sequence[ReadOnlyTable],
        before: Sequence[ReadOnlyTable] = (),
        codes: Mapping[str, Tensor] | None = None,
    ) -> list[ReadOnlyTable]:
        """Moves tables to the device.

        Args:
            tables: all tables of a model, without changes, with index and rows in host memory.
            before: tables of the previous version. Their counts of lookups are kept, by id.
            codes: codes of counts of lookups in training, by table name, for tables without counts
                in the previous version.
        """
        limits = shares({table.name: table.rows.numel() for table in tables}, self.hbm_bytes)
        hot_tables = {table.name: table for table in before if table.hot is not None}
        codes = codes or {}
        return [
            self._placed(each, limits[each.name], hot_tables.get(each.name), codes.get(each.name))
            for each in tables
        ]

    def _placed(
        self,
        table: ReadOnlyTable,
        limit: int,
        before: ReadOnlyTable | None,
        codes: Tensor | None,
    ) -> ReadOnlyTable:
        index = table.index.to(self.device)
        if table.rows.numel() <= limit:
            rows = table.rows.to(self.device)
            return dataclasses.replace(table, index=index, rows=rows, hot=None)
        entries, row_bytes = table.rows.shape
        rows = _ops.serving_pinned(table.rows, self.device)
        host_lookups = torch.zeros(1, dtype=torch.int64, device=self.device)
        if before is not None:
            counts, host_lookups = carried_counts(index, entries, before), before.hot.host_lookups
        elif codes is not None:
            counts = counts_of(codes.to(self.device))
        else:
            counts = torch.zeros(entries, dtype=torch.int32, device=self.device)
        words, hot = _empty(entries, min(limit // row_bytes, _MAX_HOT), row_bytes, self.device)
        _choose(rows, counts.cpu(), None, words, hot)
        hot_rows = ServingHotRows(words, hot, counts, host_lookups)
        return dataclasses.replace(table, index=index, rows=rows, hot=hot_rows)


def shares(sizes: Mapping[str, int], hbm_bytes: HbmBytes | None) -> dict[str, int]:
    """Bytes of HBM for the rows of each table.

    Args:
        sizes: bytes of the rows of each table.
        hbm_bytes: one number that all tables share equally, without more for a table than it
            takes; or numbers by table. None: as many as the tables take.
    """
    if hbm_bytes is None:
        return dict(sizes)
    if isinstance(hbm_bytes, Mapping):
        return {name: hbm_bytes.get(name, size) for name, size in sizes.items()}
    result, remaining = {}, hbm_bytes
    for number, name in enumerate(sorted(sizes, key=lambda name: sizes[name])):
        result[name] = min(sizes[name], remaining // (len(sizes) - number))
        remaining -= result[name]
    return result


def carried_counts(index: Tensor, entries: int, before: ReadOnlyTable) -> Tensor:
    """Counts of lookups, int32 ``[entries]``, from the counts of the previous version.

    Lookups of ids that deltas have changed were not counted. Such an id gets at least the mean
    count of the hot rows.

    Args:
        index: index of the table, on the device of the previous version.
        entries: number of its rows.
        before: the table in the previous version.
    """
    counts = torch.zeros(entries, dtype=torch.int32, device=index.device)
    of_hot = int(before.hot.counts.sum(dtype=torch.int64)) // max(1, before.hot.rows.shape[0])
    for ids, rows in numbered_ids(index):
        found = _ops.serving_row_numbers(before.index, ids)
        is_known = found >= 0
        counts[rows[is_known]] = before.hot.counts[found[is_known]]
        if before.changed_index is not None:
            is_changed = _ops.serving_row_numbers(before.changed_index, ids) >= 0
            counts[rows[is_changed]] = counts[rows[is_changed]].clamp_(min=1 + of_hot)
    return counts


def numbered_ids(index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids of an index and the numbers of their rows, in batches."""
    places = torch.arange(_BUCKET_IDS, device=index.device)
    for buckets in index.view(-1, 1 + _BUCKET_IDS).split(_BATCH_BUCKETS):
        headers, ids = buckets[:, 0], buckets[:, 1:]
        is_there = places < (headers >> 40 & 7)[:, None]
        first = headers & ((1 << 40) - 1)
        yield ids[is_there], (first[:, None] + places)[is_there]


def rechoose_hot_rows(table: ReadOnlyTable) -> ServingHotRows:
    """Chooses as many hot rows as a table has, by its counts, and halves the counts.

    Lookups on the current stream continue meanwhile. Returns when the rows are in HBM.
    """
    device, before = table.index.device, table.hot
    words, hot = _empty(table.rows.shape[0], *before.rows.shape, device)
    # Memory of the current stream is filled on another stream, so that lookups don't wait.
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        counts = before.counts.cpu()
        before.counts.bitwise_right_shift_(1)
        _choose(table.rows, counts, before.words.cpu(), words, hot)
    side.synchronize()
    return dataclasses.replace(before, words=words, rows=hot)


def _empty(entries: int, hot: int, row_bytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    words = torch.empty(-(-entries // 32), 2, dtype=torch.int32, device=device)
    return words, torch.empty(hot, row_bytes, dtype=torch.uint8, device=device)


def _choose(
    rows: Tensor, counts: Tensor, before: Tensor | None, words: Tensor, hot: Tensor
) -> None:
    """Chooses rows by counts in host memory, and copies them to HBM."""
    words.copy_(_ops.serving_choose_hot(counts, before, hot.shape[0]))
    _ops.serving_copy_hot(words, rows, hot)


def _checked(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r}, but must be a number of bytes, at least 0.")
    return value
