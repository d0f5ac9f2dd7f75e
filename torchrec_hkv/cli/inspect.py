"""Describes the tables of a checkpoint: ids, load, ages, counts, bytes, steps; or one id's row.

torchrec-hkv inspect checkpoints/last
torchrec-hkv inspect deltas --table user
torchrec-hkv inspect deltas --table user --id 4711
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchrec_hkv.cli.folders import FOLDER, add_memory, add_table, memory, open_folder
from torchrec_hkv.cli.result import CommandResult
from torchrec_hkv.cli.sizes import parse_id

if TYPE_CHECKING:
    from torchrec_hkv.checkpoint.saved_checkpoint import OpenedTable, SavedCheckpoint

HELP = "what a checkpoint, a chain of deltas or a saved hash table holds"
_BAR = 30
_SHOWN = 8
# Both policies keep the same scores, and files do not distinguish them.
_POLICIES = {"aged_lfu": "adaptive or AgedLFU"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument("folder", help=FOLDER)
    add_table(parser)
    parser.add_argument(
        "--id", help="show where an id is, and its row; exit with 1 if no table has it"
    )
    add_memory(parser)


def run(arguments: argparse.Namespace) -> CommandResult:
    """Inspects a folder."""
    from torchrec_hkv.checkpoint.inspection import bytes_to_inspect, find, inspect_table
    from torchrec_hkv.progress import reported

    batch_bytes = memory(arguments)
    id_to_find = None if arguments.id is None else parse_id("--id", arguments.id)
    saved = open_folder(arguments.folder)
    tables = list(saved.tables.values())
    if arguments.table is not None:
        tables = [saved.table(arguments.table)]
    backend_tables = [table for table in tables if table.parts is not None]
    if id_to_find is not None:
        found = {table.name: find(table, id_to_find, batch_bytes) for table in backend_tables}
        content: dict[str, Any] = {
            "id": id_to_find,
            "tables": {
                name: None if entry is None else dataclasses.asdict(entry)
                for name, entry in found.items()
            },
        }
        code = 0 if any(entry is not None for entry in found.values()) else 1
        return CommandResult(_id_text(content), content, code)
    content = _folder(saved)
    with reported("Inspecting", sum(map(bytes_to_inspect, backend_tables))):
        content["tables"] = [
            inspect_table(table, batch_bytes) if table.parts is not None else _by_number(table)
            for table in tables
        ]
    return CommandResult(_text(content), content)


def _folder(saved: SavedCheckpoint) -> dict[str, Any]:
    content: dict[str, Any] = {"folder": str(saved.path), "kind": saved.kind}
    if saved.layers:
        folder, record = saved.layers[0]
        content |= {
            "newest": folder.name,
            "save": record.save,
            "world_size": record.world_size,
            "has_optimizer": record.has_optimizer,
            "tensor_bytes": sum(file.bytes for file in record.files.values()),
            "learning_rates": len(record.learning_rates),
        }
    content["chain"] = [
        {
            "name": link.name,
            "kind": link.kind,
            "bytes": sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()),
        }
        for folder, link in saved.chain()
    ]
    content["bytes"] = sum(p.stat().st_size for p in saved.path.rglob("*") if p.is_file())
    return content


def _by_number(table: OpenedTable) -> dict[str, Any]:
    """A table whose values are stored as tensors by row number."""
    return {"name": table.name, "backend": table.backend, "identity": table.identity}


def _text(content: dict[str, Any]) -> str:
    from torchrec_hkv.planner.report import format_bytes

    lines = [f"{content['folder']}: {content['kind']}, {format_bytes(content['bytes'])}"]
    if "save" in content:
        lines.append(
            f"  save {content['save']}, {content['world_size']} ranks, "
            f"{'with' if content['has_optimizer'] else 'without'} an optimizer, "
            f"tensors {format_bytes(content['tensor_bytes'])}"
        )
    for link in content["chain"]:
        lines.append(f"  {link['name']}  {format_bytes(link['bytes'])}")
    for table in content["tables"]:
        lines += ["", *_table_text(table, format_bytes)]
    return "\n".join(lines)


def _table_text(table: dict[str, Any], format_bytes: Any) -> list[str]:
    if "ids" not in table:
        shown = ", ".join(f"{key} {value}" for key, value in table["identity"].items())
        return [f"{table['name']}  {table['backend']}: values by row number ({shown})"]
    lines = [
        f"{table['name']}  {table['backend']}",
        f"  ids      {table['ids']:,} in {table['slots']:,} slots, {100 * table['fill']:.1f} % full"
        f"; num_embeddings {table['capacity']:,}",
        f"  rows     {table['dim']} x {table['dtype']}, states {table['state_values']} x float32, "
        f"eviction {_POLICIES.get(table['eviction'], table['eviction'])}, seed {table['seed']}",
        f"  steps    {table['steps']:,} (clock), {table['updates']:,} updates, "
        f"epoch {table['epoch']}",
        f"  bytes    {format_bytes(table['bytes'])}, {len(table['shards'])} x "
        f"{table['column_shards']} shards (rows x columns)"
        + (f", {table['deltas']} deltas" if table["deltas"] else ""),
    ]
    fills = [shard["fill"] for shard in table["shards"]]
    if len(fills) > 1:
        lines.append(f"  shards   {100 * min(fills):.1f} to {100 * max(fills):.1f} % full")
    lines += ["  age (steps since the last training lookup)", *_bars(table["ages"])]
    if "counts" in table:
        lines += ["  count (lookups)", *_bars(table["counts"])]
    return lines


def _bars(rows: Sequence[dict[str, int]]) -> list[str]:
    """A histogram of at most ``_SHOWN`` lines; neighbouring bins are merged."""
    rows = list(rows)
    while len(rows) > _SHOWN:
        rows = [
            {
                "from": pair[0]["from"],
                "to": pair[-1]["to"],
                "entries": sum(row["entries"] for row in pair),
            }
            for pair in (rows[i : i + 2] for i in range(0, len(rows), 2))
        ]
    total = sum(row["entries"] for row in rows)
    labels = [
        f"{row['from']:,}" if row["from"] == row["to"] else f"{row['from']:,} to {row['to']:,}"
        for row in rows
    ]
    width = max(map(len, labels), default=0)
    maximum = max((row["entries"] for row in rows), default=1)
    return [
        f"    {label:>{width}}  {'#' * round(_BAR * row['entries'] / maximum):<{_BAR}} "
        f"{100 * row['entries'] / total:5.1f} %"
        for label, row in zip(labels, rows, strict=True)
    ]


def _id_text(content: dict[str, Any]) -> str:
    lines = []
    for name, entry in content["tables"].items():
        if entry is None:
            lines.append(f"{name}: has no id {content['id']}")
            continue
        score = "" if entry["score"] is None else f", score {entry['score']}"
        lines += [
            f"{name}: id {content['id']} in shard {entry['shard']}, slot {entry['slot']}; "
            f"last step {entry['last_step']}, {entry['age']} steps ago{score}",
            f"  row     {_values(entry['row'])}",
        ]
        if entry["states"]:
            lines.append(f"  states  {_values(entry['states'])}")
    return "\n".join(lines) or "There is no table with ids."


def _values(values: Sequence[float]) -> str:
    shown = " ".join(f"{value:.6g}" for value in values[:_SHOWN])
    return shown + (f" … ({len(values)} values)" if len(values) > _SHOWN else "")
