"""The program of a served model as an AOTInductor package, which a C++ program runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from torchrec_hkv.serving.manifest import TableRecord, TTGroupRecord

#: The package's metadata that says which tables its lookups are in.
TABLES = "torchrec_hkv.tables"


def write_package(
    exported: torch.export.ExportedProgram,
    path: Path,
    tables: Sequence[TableRecord],
    groups: Sequence[TTGroupRecord],
) -> None:
    """Compiles a program and writes it.

    Args:
        exported: the program.
        path: of the package.
        tables: of rows, as the program numbers them.
        groups: of Tensor-Train tables, which only Python opens.

    Raises:
        ValueError: there are Tensor-Train tables.
    """
    if groups:
        names = [name for group in groups for name in group.names]
        raise ValueError(
            f"package is True, but tables {names} are written as cores, which a C++ program can't "
            "open: export them as rows, as by rows={name: 'fp16'}."
        )
    metadata = {TABLES: "\n".join(map(describe_table, tables))}
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(path),
            inductor_configs={"aot_inductor.metadata": metadata},
        )


def describe_table(table: TableRecord) -> str:
    """A line of the metadata: the name, the file, then numbers, as docs/guide/serving.md says."""
    rows, initial = table.rows, table.initial.arguments()
    fields = [
        table.name,
        rows.file,
        rows.entries,
        rows.blocks,
        rows.block_buckets,
        rows.dim,
        rows.row_format,
        repr(rows.unit),
        table.initial.seed,
        initial["distribution"],
        *(repr(float(initial[key])) for key in ("low", "high", "mean", "std")),
        *(repr(float(number)) for number in table.default_row or ()),
    ]
    return "\t".join(map(str, fields))
