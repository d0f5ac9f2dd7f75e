"""Compares two checkpoints: ids that were added, removed or changed, and by how much.

torchrec-hkv diff monday tuesday
torchrec-hkv diff deltas/delta-000003 deltas/delta-000004 --table user

Exits with 1 if they differ.
"""

from __future__ import annotations

import argparse
from typing import Any

from torchrec_hkv.cli.folders import FOLDER, add_memory, add_table, memory, open_folder
from torchrec_hkv.cli.result import CommandResult

HELP = "how two checkpoints differ, id by id"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument("first", help=FOLDER)
    parser.add_argument("second", help="folder to compare it with")
    add_table(parser)
    add_memory(parser)


def run(arguments: argparse.Namespace) -> CommandResult:
    """Compares two folders."""
    from torchrec_hkv.checkpoint.comparison import bytes_to_compare, compare
    from torchrec_hkv.progress import reported

    batch_bytes = memory(arguments)
    first, second = open_folder(arguments.first), open_folder(arguments.second)
    if arguments.table is not None:
        pairs = [(first.hash_table(arguments.table), second.hash_table(arguments.table))]
        alone: dict[str, list[str]] = {}
    else:
        backend_tables = [
            {name: table for name, table in saved.tables.items() if table.parts is not None}
            for saved in (first, second)
        ]
        pairs = [
            (backend_tables[0][name], backend_tables[1][name])
            for name in backend_tables[0]
            if name in backend_tables[1]
        ]
        alone = {
            str(saved.path): [name for name in own_tables if name not in other]
            for saved, own_tables, other in (
                (first, *backend_tables),
                (second, *reversed(backend_tables)),
            )
        }
    if not pairs:
        raise ValueError(f"{first.path} and {second.path} have no hash table in common.")
    with reported("Comparing", sum(bytes_to_compare(*pair) for pair in pairs)):
        tables = {pair[0].name: compare(*pair, batch_bytes).content() for pair in pairs}
    content = {
        "first": str(first.path),
        "second": str(second.path),
        "tables": tables,
        "only_in": {path: names for path, names in alone.items() if names},
    }
    equal = all(table["equal"] for table in tables.values()) and not content["only_in"]
    return CommandResult(_text(content), {**content, "equal": equal}, 0 if equal else 1)


def _text(content: dict[str, Any]) -> str:
    lines = []
    for name, table in content["tables"].items():
        lines += [
            f"{name}  {table['before']:,} ids, then {table['after']:,}",
            f"  came     {table['came']:,}",
            f"  left     {table['left']:,}",
            f"  changed  {table['changed']:,} rows; {table['same']:,} are the same",
        ]
        if table["changed"]:
            lines.append(
                f"  by       {table['norm']:.6g} in all (L2), {100 * table['relative_change']:.3g} "
                f"% of the rows' norm; a value by {table['largest']:.6g} at most"
            )
            maximum = ", ".join(f"{id_} ({norm:.4g})" for id_, norm in table["most"])
            lines.append(f"  most     {maximum}")
        states = table["states_changed"]
        if states is not None:
            lines.append(f"  states   of {states:,} ids changed")
        lines.append(f"  steps    or scores of {table['steps_changed']:,} ids changed")
    for path, names in content["only_in"].items():
        lines.append(f"Only in {path}: {', '.join(names)}")
    return "\n".join(lines)
