"""Conversion between the matrix of rows in calls and one tensor per feature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.hash_table.groups.call_arguments import CallArguments
from torchrec_hkv.hash_table.stored_rows import number_dtype
from torchrec_hkv.hash_table.table_spec import TableSpec


class GroupRows:
    """Rows of several dims in one matrix; a base of ``TableGroup``."""

    tables: tuple[TableSpec, ...]
    device: torch.device
    feature_tables: tuple[int, ...]
    _arguments: CallArguments

    def split_rows(self, rows: Tensor, offsets: Tensor, batch_size: int) -> list[Tensor]:
        """Splits a matrix of rows by feature. Synchronizes with the device.

        Args:
            rows: ``[n, row_width]``, as returned by calls of the group.
            offsets: the offsets of the call.
            batch_size: the batch size of the call.

        Returns:
            For each feature a tensor ``[ids of the feature, dim of its table]`` of its table's
            dtype (float32 for int8); a view of ``rows`` if the dtypes are equal.
        """
        ends = offsets[:: max(1, batch_size)].tolist()
        features = len(self.feature_tables)
        if batch_size < 1 or len(ends) != features + 1 or ends[-1] != rows.shape[0]:
            raise ValueError(
                f"offsets of {features} features and batch_size {batch_size} must end with the "
                f"number of rows, {rows.shape[0]}, but there are {offsets.numel()} that end with "
                f"{int(offsets[-1]) if offsets.numel() else 'nothing'}."
            )
        specs = [self.tables[table] for table in self.feature_tables]
        return [
            rows[begin:end, : spec.dim].to(number_dtype(spec.dtype))
            for spec, begin, end in zip(specs, ends[:-1], ends[1:], strict=True)
        ]

    def join_rows(self, rows: Sequence[Tensor]) -> Tensor:
        """Joins rows by feature to the matrix that calls of the group take.

        Args:
            rows: for each feature a tensor ``[ids of the feature, dim of its table]``.

        Returns:
            ``[n, row_width]``; zeros in columns beyond the dim of a narrower table.
        """
        if len(rows) != len(self.feature_tables):
            raise ValueError(
                f"rows must be {len(self.feature_tables)} tensors, one for each feature, but are "
                f"{len(rows)}."
            )
        joined = torch.zeros(
            (sum(part.shape[0] for part in rows), self._arguments.row_width),
            dtype=self._arguments.dtype,
            device=self.device,
        )
        begin = 0
        for feature, (table, part) in enumerate(zip(self.feature_tables, rows, strict=True)):
            dim = self.tables[table].dim
            if part.dim() != 2 or part.shape[1] != dim:
                raise ValueError(
                    f"rows[{feature}] must have {dim} columns, those of table "
                    f"{self.tables[table].name!r}, but has shape {tuple(part.shape)}."
                )
            joined[begin : begin + part.shape[0], :dim] = part
            begin += part.shape[0]
        return joined
