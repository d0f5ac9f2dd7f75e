"""Where a model's tables are, and which rows of a table larger than a GPU's memory are there.

Such a table has all rows in host memory, which the GPU reads in place, and its hot rows also in
HBM. ``csrc/serving/hot_rows.h`` describes the hot rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchrec_hkv.serving import ops
from torchrec_hkv.serving.tables import HotRows, ReadOnlyTable
from torchrec_hkv.table_names import find_name

__all__ = ["HbmBytes", "Placement", "chosen_again", "ops", "shares"]

_ops = torch.ops.torchrec_hkv
#: Bytes of HBM for rows, of all tables together or by table.
HbmBytes = int | Mapping[str, int]
_MOST_HOT = (1 << 32) - 1


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where tables are.

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

    def place(self, tables: Sequence[ReadOnlyTable]) -> list[ReadOnlyTable]:
        """Moves tables to the device.

        Args:
            tables: all tables of a model, without changes, with index and rows in host memory.
                ``hot`` is that of the version before, if there is one.
        """
        limits = shares({table.name: table.rows.numel() for table in tables}, self.hbm_bytes)
        return [self._placed(table, limits[table.name]) for table in tables]

    def _placed(self, table: ReadOnlyTable, limit: int) -> ReadOnlyTable:
        index = table.index.to(self.device)
        if table.rows.numel() <= limit:
            rows = table.rows.to(self.device)
            return dataclasses.replace(table, index=index, rows=rows, hot=None)
        entries, row_bytes = table.rows.shape
        rows = _ops.serving_pinned(table.rows, self.device)
        counts = torch.zeros(entries, dtype=torch.int32, device=self.device)
        words, hot = _empty(entries, min(limit // row_bytes, _MOST_HOT), row_bytes, self.device)
        _choose(rows, counts.cpu(), words, hot)
        if table.hot is None:
            host_lookups = torch.zeros(1, dtype=torch.int64, device=self.device)
        else:
            host_lookups = table.hot.host_lookups
        its = HotRows(words, hot, counts, host_lookups)
        return dataclasses.replace(table, index=index, rows=rows, hot=its)


def shares(sizes: Mapping[str, int], hbm_bytes: HbmBytes | None) -> dict[str, int]:
    """Bytes of HBM for the rows of each table.

    Args:
        sizes: bytes of the rows of each table.
        hbm_bytes: bytes of all together, or by table; None: as many as they take. All together are
            shared equally, but no table gets more than it takes.
    """
    if hbm_bytes is None:
        return dict(sizes)
    if isinstance(hbm_bytes, Mapping):
        return {name: hbm_bytes.get(name, size) for name, size in sizes.items()}
    made, left = {}, hbm_bytes
    for number, name in enumerate(sorted(sizes, key=lambda name: sizes[name])):
        made[name] = min(sizes[name], left // (len(sizes) - number))
        left -= made[name]
    return made


def chosen_again(table: ReadOnlyTable) -> HotRows:
    """As many hot rows as a table has, chosen by its counts, which are then halved.

    Lookups on the current stream go on meanwhile. Returns when the rows are in HBM.
    """
    device, before = table.index.device, table.hot
    words, hot = _empty(table.rows.shape[0], *before.rows.shape, device)
    # Memory of the current stream is filled on another one, so that lookups don't wait.
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        counts = before.counts.cpu()
        before.counts.bitwise_right_shift_(1)
        _choose(table.rows, counts, words, hot)
    side.synchronize()
    return dataclasses.replace(before, words=words, rows=hot)


def _empty(entries: int, hot: int, row_bytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    words = torch.empty(-(-entries // 32), 2, dtype=torch.int32, device=device)
    return words, torch.empty(hot, row_bytes, dtype=torch.uint8, device=device)


def _choose(rows: Tensor, counts: Tensor, words: Tensor, hot: Tensor) -> None:
    """Chooses rows by counts in host memory, and copies them to HBM."""
    words.copy_(_ops.serving_choose_hot(counts, hot.shape[0]))
    _ops.serving_copy_hot(words, rows, hot)


def _checked(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r}, but must be a number of bytes, at least 0.")
    return value
