"""Converts tables of other programs to checkpoints of this package, and back."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torchrec_hkv.backends.save_types import FileOptions
from torchrec_hkv.checkpoint.conversion.dcp_source import DcpKeys, dcp_tables, table_names
from torchrec_hkv.checkpoint.conversion.dcp_tensors import DcpFolder
from torchrec_hkv.checkpoint.conversion.dynamicemb import dump_tables, find_dumps
from torchrec_hkv.checkpoint.conversion.row_files import open_row_file, row_table
from torchrec_hkv.checkpoint.conversion.source import Eviction, SourceTable
from torchrec_hkv.checkpoint.conversion.to_checkpoint import write_checkpoint
from torchrec_hkv.checkpoint.conversion.to_dcp import write_dcp
from torchrec_hkv.checkpoint.export_files import export_files
from torchrec_hkv.checkpoint.metadata import DCP_METADATA
from torchrec_hkv.checkpoint.record import RECORD, TENSORS
from torchrec_hkv.checkpoint.saved_checkpoint import SavedCheckpoint
from torchrec_hkv.progress import reported

_THREADS = 4
#: Endings of the names of files with ids and rows.
_ROW_SUFFIXES = (".parquet", ".safetensors")


@dataclasses.dataclass(frozen=True)
class ConversionOptions:
    """How tables are converted.

    Attributes:
        tables: full names or own names of the tables to convert; empty for all. For a file of ids
            and rows: the full name of its table.
        renamed: pairs of prefixes of full names: the prefix to replace, and the new prefix.
        optimizer: name of the optimizer whose states the source has; None: found from the source.
        eviction: policy of the created hash tables; None: found from the source.
        seeds: seeds of the created hash tables, by table names; the key ``""`` is for all others.
            They must be those of the model's options. Default: 0.
        without: ``"states"`` leaves out optimizer states, ``"scores"`` scores and last steps.
        num_embeddings: numbers of rows of the created stock tables, by table names; the key ``""``
            is for all others.
        model_key: prefix of the model's names in a ``state_dict``; None: found from the source.
        optimizer_key: prefix of the optimizer's names; None: found from the source.
        sequences: whether tables of a dump without full names are of an ``EmbeddingCollection``.
        backend: backend of the created hash tables.
        batch_bytes: memory limit in bytes.
    """

    tables: Sequence[str] = ()
    renamed: Sequence[tuple[str, str]] = ()
    optimizer: str | None = None
    eviction: Eviction | None = None
    seeds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    without: Sequence[Literal["states", "scores"]] = ()
    num_embeddings: Mapping[str, int] = dataclasses.field(default_factory=dict)
    model_key: str | None = None
    optimizer_key: str | None = None
    sequences: bool = False
    backend: str = "hkv"
    batch_bytes: int = 512 << 20

    def rename(self, name: str) -> str:
        """The new full name of a table."""
        for old, new in self.renamed:
            if name == old or name.startswith(f"{old}.") or old == "":
                rest = name.removeprefix(old).removeprefix(".")
                return ".".join(filter(None, (new, rest)))
        return name


def convert(
    source: str | os.PathLike[str], into: str | os.PathLike[str], options: ConversionOptions
) -> dict[str, Any]:
    """Converts tables. The result appears when it is complete.

    A checkpoint of this package, a chain of deltas or a saved hash table becomes a folder of
    :mod:`torch.distributed.checkpoint` for stock tables, or a file of ids and rows if ``into`` ends
    with ``.parquet`` or ``.safetensors``. Every other source becomes a checkpoint of this package.

    Args:
        source: a folder or a file: a checkpoint, a folder of :mod:`torch.distributed.checkpoint`, a
            dump of dynamicemb, a file of ids and rows, or a folder of ``id.npy`` and ``row.npy``.
        into: the folder or file to write.
        options: how to convert.

    Returns:
        ``source`` and ``into``: kinds of what was read and written; ``tables``: numbers of ids by
        table; ``tensors``: number of other entries that were copied.

    Raises:
        ValueError: the source is none of these, is damaged, or does not match the options. Nothing
            is written then.
        OSError: writing failed; what was written is removed.
    """
    path, target = Path(source), Path(into)
    if not path.exists():
        raise ValueError(f"There is no file or folder {path}.")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"There is no folder {target.absolute().parent} to write to.")
    if (path / RECORD).is_file() or _is_saved(path):
        return _from_checkpoint(path, target, options)
    if target.suffix in _ROW_SUFFIXES:
        raise ValueError(
            f"{path} is not a checkpoint of this package, and only these become files of ids and "
            "rows: convert it to a checkpoint first."
        )
    return _to_checkpoint(path, target, options)


def _is_saved(path: Path) -> bool:
    """Whether a folder is a chain of deltas or a saved hash table."""
    if not path.is_dir() or (path / DCP_METADATA).is_file():
        return False
    try:
        SavedCheckpoint.open(path)
    except ValueError:
        return False
    return True


def _to_checkpoint(path: Path, target: Path, options: ConversionOptions) -> dict[str, Any]:
    tensors: tuple[DcpFolder, Mapping[str, str]] | None = None
    has_optimizer = False
    if (path / DCP_METADATA).is_file():
        kind = "torch.distributed.checkpoint"
        folder = DcpFolder(path)
        keys = DcpKeys.of(folder, options.model_key, options.optimizer_key)
        chosen = _chosen_names(table_names(folder, keys), options.tables, path)
        found = dcp_tables(folder, keys, options.optimizer, options.without, chosen)
        tables = _in_order(found.tables, chosen)
        left_out = {key for table in tables for key in found.entries[table.name]}
        names = _copied_names(folder, keys, left_out, options)
        has_optimizer = keys.optimizer is not None
        tensors = folder, names
    elif (file := open_row_file(path)) is not None:
        kind = "ids and rows"
        if len(options.tables) != 1:
            raise ValueError(
                f"{path} has no name for its table: give its full name, such as --table "
                "ebc.embedding_bags.user."
            )
        name, optimizer = options.tables[0], options.optimizer
        tables = [row_table(file, name, optimizer, options.eviction, options.without)]
    elif path.is_dir() and find_dumps(path):
        kind = "dynamicemb"
        attribute = "embeddings" if options.sequences else "embedding_bags"
        dumped = dump_tables(path, attribute, options.optimizer, options.eviction, options.without)
        chosen = _chosen_names([table.name for table in dumped], options.tables, path)
        tables = _in_order(dumped, chosen)
    else:
        raise ValueError(
            f"{path} can't be converted: name a checkpoint, a folder of "
            "torch.distributed.checkpoint, a dump of dynamicemb, a .safetensors or .parquet file, "
            "or a folder with id.npy and row.npy."
        )
    renamed = [dataclasses.replace(t, name=options.rename(t.name)) for t in tables]
    _check_names([table.name for table in renamed])
    # Entries are read once and written once.
    total = 2 * sum(table.bytes for table in tables)
    if tensors is not None:
        total += sum(tensors[0].bytes(key) for key in tensors[1])
    with reported(f"Converting {path.name}", total):
        ids = write_checkpoint(
            target,
            renamed,
            tensors,
            seeds=_by_table("--seed", options.seeds, [table.name for table in renamed]),
            eviction=options.eviction,
            has_optimizer=has_optimizer,
            backend=options.backend,
            options=FileOptions(options.batch_bytes, _THREADS),
        )
    num_tensors = 0 if tensors is None else len(tensors[1])
    return {"source": kind, "into": "checkpoint", "tables": ids, "tensors": num_tensors}


def _chosen_names(tables: Sequence[str], names: Sequence[str], path: Path) -> list[str]:
    """The full names of the tables with the given full or own names; all if none are given."""
    if not names:
        if not tables:
            raise ValueError(
                f"{path} has no table: none of its tensors has rows by number or by id."
            )
        return list(tables)
    chosen = []
    for name in names:
        found = [table for table in tables if table == name]
        found = found or [table for table in tables if table.rpartition(".")[2] == name]
        if len(found) != 1:
            raise ValueError(
                f"{path} has {len(found) or 'no'} table{'s' if len(found) > 1 else ''} {name!r}: "
                f"name one of {sorted(tables)}."
            )
        chosen += found
    return chosen


def _in_order(tables: Sequence[SourceTable], names: Sequence[str]) -> list[SourceTable]:
    by_name = {table.name: table for table in tables}
    return [by_name[name] for name in names]


def _check_names(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Two tables would be called {twice[0]!r}: rename one by --rename.")


def _copied_names(
    folder: DcpFolder, keys: DcpKeys, excluded: set[str], options: ConversionOptions
) -> dict[str, str]:
    """New names of the model's and the optimizer's entries that are copied as tensors."""
    names = {}
    for key in folder.entries:
        if key in excluded:
            continue
        if keys.optimizer is not None and key.startswith(keys.optimizer):
            begin, rest = "optimizer.", key.removeprefix(keys.optimizer)
            state = rest.removeprefix("state.")
            renamed = options.rename(state)
            names[key] = begin + (f"state.{renamed}" if rest != state else rest)
        elif key.startswith(keys.model):
            names[key] = f"model.{options.rename(key.removeprefix(keys.model))}"
    return names


def _from_checkpoint(path: Path, target: Path, options: ConversionOptions) -> dict[str, Any]:
    saved = SavedCheckpoint.open(path)
    names = options.tables
    if not names:
        tables = [table for table in saved.tables.values() if table.parts is not None]
    else:
        tables = [saved.hash_table(name) for name in names]
    if not tables:
        raise ValueError(f"{path} has no hash table.")
    with_states = "states" not in options.without
    if target.suffix in _ROW_SUFFIXES:
        if len(tables) != 1:
            raise ValueError(
                f"{path} has {len(tables)} hash tables, but a file of ids and rows holds one: name "
                f"it by --table: one of {sorted(table.name for table in tables)}."
            )
        content = export_files(tables[0], target, options.batch_bytes, with_states=with_states)
        ids = {tables[0].name: content["ids"]}
        return {"source": saved.kind, "into": "ids and rows", "tables": ids, "tensors": 0}
    rows = _by_table("--num-embeddings", options.num_embeddings, [t.name for t in tables])
    model = "model" if options.model_key is None else options.model_key
    model = f"{model}." if model else ""
    new_names = {table.name: options.rename(table.name) for table in tables}
    _check_names(list(new_names.values()))
    tensors = None
    if saved.layers:
        folder = DcpFolder(saved.layers[0][0] / TENSORS)
        copied = _copied_names(folder, DcpKeys("model.", "optimizer."), set(), options)
        tensors = (
            folder,
            {
                key: model + name.removeprefix("model.") if name.startswith("model.") else name
                for key, name in copied.items()
            },
        )
    total = 2 * sum(table.entries * table.entry_bytes() for table in tables)
    if tensors is not None:
        total += sum(tensors[0].bytes(key) for key in tensors[1])
    with reported(f"Converting {path.name}", total):
        ids = write_dcp(
            target,
            tables,
            rows,
            new_names,
            tensors,
            model=model,
            with_states=with_states,
            batch_bytes=options.batch_bytes,
        )
    written = 0 if tensors is None else len(tensors[1])
    return {
        "source": saved.kind,
        "into": "torch.distributed.checkpoint",
        "tables": ids,
        "tensors": written,
    }


def _by_table(what: str, given: Mapping[str, int], tables: Sequence[str]) -> dict[str, int]:
    """Values of an option by full names of tables; the key ``""`` gives those of unnamed tables."""
    short_names = {name: name.rpartition(".")[2] for name in tables}
    unknown = sorted(set(given) - {*short_names, *short_names.values(), ""})
    if unknown:
        raise ValueError(
            f"{what} names table {unknown[0]!r}, which is not converted: name one of "
            f"{sorted(tables)}."
        )
    return {
        name: next(
            given[candidate] for candidate in (name, short_names[name], "") if candidate in given
        )
        for name in tables
        if not {name, short_names[name], ""}.isdisjoint(given)
    }
