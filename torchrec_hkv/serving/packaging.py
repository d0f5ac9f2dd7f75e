"""The program of a served model as an AOTInductor package, which a C++ program runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from torchrec_hkv.serving.manifest import ServingTableRecord, TTGroupRecord

#: Key of the package's metadata that describes its tables.
TABLES = "torchrec_hkv.tables"


def write_package(
    exported: torch.export.ExportedProgram,
    path: Path,
    tables: Sequence[ServingTableRecord],
    groups: Sequence[TTGroupRecord],
) -> None:
    """Compiles a program and writes the package.

    Args:
        exported: the program.
        path: path of the package.
        tables: tables of rows, in the order of their numbers in the program.
        groups: groups of Tensor-Train tables, which only Python supports.

    Raises:
        ValueError: there are Tensor-Train tables.
    """
    if groups:
        names = [name for group in groups for name in group.names]
        raise ValueError(
            f"package is True, but tables {names} are written as cores, which C++ programs don't "
            "support: export them as rows, for example rows={name: 'fp16'}."
        )
    metadata = {TABLES: "\n".join(map(describe_table, tables))}
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(path),
            inductor_configs={"aot_inductor.metadata": metadata},
        )


def describe_table(table: ServingTableRecord) -> str:
    """The line of a table in the metadata. Tabs separate the fields: name, file, entries, blocks of
    the index, buckets of a block, columns, row format, unit; then, for unknown ids, seed,
    distribution, low, high, mean, standard deviation, and the numbers of the default row, if there
    is one."""
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
