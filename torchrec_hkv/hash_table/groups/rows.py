"""Rows of a group's tables: the matrix that calls take and give, and a tensor a feature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.hash_table.groups.call_arguments import CallArguments
from torchrec_hkv.hash_table.table_spec import TableSpec


class GroupRows:
    """Rows of several dims in one tensor. Part of ``TableGroup``, which has the rest."""

    tables: tuple[TableSpec, ...]
    device: torch.device
    feature_tables: tuple[int, ...]
    _arguments: CallArguments

    def split_rows(self, rows: Tensor, offsets: Tensor, batch_size: int) -> list[Tensor]:
        """A tensor of rows for each feature (waits for the device).

        Args:
            rows: ``[n, row_width]``, as calls of the group give them.
            offsets: as in the call.
            batch_size: as in the call.

        Returns:
            ``[ids of the feature, dim of its table]``, of its table's dtype; views of ``rows``
            where the dtypes allow.
        """
        ends = offsets[:: max(1, batch_size)].tolist()
        features = len(self.feature_tables)
        if batch_size < 1 or len(ends) != features + 1 or ends[-1] != rows.shape[0]:
            raise ValueError(
                f"offsets of {features} features and a batch_size of {batch_size} must go to the "
                f"number of rows, {rows.shape[0]}, but are {offsets.numel()} that go to "
                f"{int(offsets[-1]) if offsets.numel() else 'nothing'}."
            )
        specs = [self.tables[table] for table in self.feature_tables]
        return [
            rows[begin:end, : spec.dim].to(spec.dtype)
            for spec, begin, end in zip(specs, ends[:-1], ends[1:], strict=True)
        ]

    def join_rows(self, rows: Sequence[Tensor]) -> Tensor:
        """The matrix of rows that calls of the group take.

        Args:
            rows: for each feature ``[ids of the feature, dim of its table]``.

        Returns:
            ``[n, row_width]``, zeros past the columns of a narrower table.
        """
        if len(rows) != len(self.feature_tables):
            raise ValueError(
                f"rows must be {len(self.feature_tables)} tensors, one a feature, but are "
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
