"""Opens the files of an exported model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.serving.lookup_counts import read_codes
from torchrec_hkv.serving.manifest import ServingManifest, ServingTableRecord, TTGroupRecord
from torchrec_hkv.serving.page_cache import warm
from torchrec_hkv.serving.placement import Placement
from torchrec_hkv.serving.tables import ReadOnlyTable
from torchrec_hkv.tensor_train import TTGroup, TTShape


def open_tables(
    folder: Path,
    manifest: ServingManifest,
    placement: Placement,
    verify: bool = False,
    before: Sequence[ReadOnlyTable] = (),
) -> list[ReadOnlyTable]:
    """Opens the tables of an exported model.

    Args:
        folder: folder of the model.
        manifest: its manifest.
        placement: placement of the tables.
        verify: as for :func:`torchrec_hkv.serving.load`.
        before: tables of the previous version, as for :meth:`Placement.place`.
    """
    records = manifest.tables
    tables = [_open_table(folder, record, placement, verify) for record in records]
    counts = {}
    if verify or placement.hbm_bytes is not None:
        counts = {
            table_record.name: read_codes(folder, table_record.counts, table_record.rows.entries)
            for table_record in records
            if table_record.counts is not None
        }
    tables = placement.place(tables, before, counts)
    if placement.device.type == "cpu" and not placement.resident:
        warm(
            folder,
            [
                (table_record.rows, table.index)
                for table_record, table in zip(records, tables, strict=True)
            ],
        )
    return tables


def _open_table(
    folder: Path, record: ServingTableRecord, placement: Placement, verify: bool
) -> ReadOnlyTable:
    """A table with index and rows in host memory."""
    if verify:
        record.rows.verify(folder)
    index, rows = record.rows.map(folder, placement.resident)
    default = None
    if record.default_row is not None:
        default = torch.tensor(record.default_row, device=placement.device)
    return ReadOnlyTable(
        record.name,
        record.rows.dim,
        record.rows.row_format,
        index,
        rows,
        record.rows.unit,
        record.initial.seed,
        record.initial.arguments(),
        default,
    )


def open_group(
    folder: Path, record: TTGroupRecord, device: torch.device
) -> tuple[TTGroup, list[Tensor]]:
    """Opens Tensor-Train tables."""
    record.cores.check(folder)
    shapes = [TTShape(**dataclasses.asdict(shape)) for shape in record.shapes]
    group = TTGroup(shapes, record.feature_tables, None, record.names)
    dtype = getattr(torch, record.dtype)
    sizes = group.core_shapes
    counts = [torch.Size(size).numel() for size in sizes]
    if record.cores.bytes != sum(counts) * dtype.itemsize:
        raise ValueError(
            f"{folder / record.cores.file} has {record.cores.bytes} bytes, but its cores take "
            f"{sum(counts) * dtype.itemsize}."
        )
    flat = torch.from_file(str(folder / record.cores.file), size=sum(counts), dtype=dtype)
    pieces = zip(flat.split(counts), sizes, strict=True)
    return group, [piece.view(size).to(device, copy=True) for piece, size in pieces]
