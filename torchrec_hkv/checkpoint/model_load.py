"""Loads checkpoints of sharded models."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.save_types import FileOptions, LoadCounts
from torchrec_hkv.checkpoint.agreement import Folder, agreed
from torchrec_hkv.checkpoint.atomic_folder import AtomicFolder
from torchrec_hkv.checkpoint.dcp_folders import is_dcp_folder, load_dcp_folder
from torchrec_hkv.checkpoint.defaults import BATCH_BYTES, THREADS
from torchrec_hkv.checkpoint.layers import Layers, files_to_verify, read_saved
from torchrec_hkv.checkpoint.learning_rates import check_learning_rates, put_learning_rates
from torchrec_hkv.checkpoint.optimizers import check_optimizer
from torchrec_hkv.checkpoint.record import RECORD
from torchrec_hkv.checkpoint.shard_load import GroupLoad, are_untouched, open_tables, warn_of_losses
from torchrec_hkv.checkpoint.table_records import check_tables
from torchrec_hkv.checkpoint.tensors import TensorsLoad, file_size, verify_file
from torchrec_hkv.collective import on_every_rank, on_leader, share_of_rank, this_rank
from torchrec_hkv.progress import advance, expect, reported
from torchrec_hkv.sharding.modules.collection import skip_file_tables
from torchrec_hkv.sharding.modules.open_lookups import collect_open_lookups
from torchrec_hkv.sharding.state.names import named_collections, named_tables
from torchrec_hkv.write_behind import wait_for_saves


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    *,
    allow_loss: bool | None = None,
    strict: bool = True,
    batch_bytes: int = BATCH_BYTES,
    threads: int = THREADS,
) -> int:
    """Loads what :func:`save` or a :class:`DeltaWriter` wrote; a collective call.

    Also loads a ``state_dict`` that :mod:`torch.distributed.checkpoint` saved, of a model with hash
    tables or with stock tables. A hash table takes the rows and states of a stock table with the
    same name.

    The number of ranks and the sharding types may differ from those of the save. Rows, states,
    scores and steps of hash tables are restored bit for bit. Counts of ids that are not admitted
    are restored if the table counts in the same way.

    Args:
        path: the path of the save. For a chain of deltas: the folder of the chain, for the newest
            state, or the folder of a base or a delta, such as ``chain/delta-000003``, for the state
            of that write.
        model: a sharded model with the saved tables.
        optimizer: an optimizer with the saved parameters; it may have made steps. It gets the
            saved learning rates, too.
        allow_loss: whether ids may be left out if hash tables have too little room. An id is left
            out if all ids in its two buckets rank higher. False refuses such a load. None, the
            default, allows it for tables whose ``num_embeddings`` is at least the saved one: in a
            full table, some ids find no slot at another number of ranks.
        strict: whether to refuse a checkpoint that lacks tables or tensors of the model. False
            leaves these unchanged; a checkpoint of tables alone needs it, such as one that
            ``torchrec-hkv convert`` made from a dump. What the model lacks is never loaded.
        batch_bytes: memory limit for hash tables on each rank, on the host and on the device each.
        threads: number of threads of each rank that read files.

    Returns:
        Number of entries of hash tables that found no slot; each column shard counts. If it is not
        0, rank 0 warns and names tables and numbers.

    Raises:
        ValueError: there is no checkpoint, a file is damaged, the checkpoint doesn't match the
            model or the optimizer, or the ranks were given different arguments. Nothing has
            changed then. Exception: the hash tables are empty afterwards if entries find no slot
            although a table is less than 95 % full, and ids may not be left out.
    """
    tables = named_tables(model)

    def arguments() -> dict[str, Any]:
        check_optimizer(optimizer)
        FileOptions(batch_bytes, threads, allow_loss)
        AtomicFolder(Path(path))
        return {
            "path": Folder.of(Path(path)),
            "optimizer": "None" if optimizer is None else "given",
            "allow_loss": allow_loss,
            "strict": strict,
            "the list of the model's tables": list(tables),
        }

    agreed(arguments)
    wait_for_saves()
    for _, collection in named_collections(model):
        collect_open_lookups(collection.group_lookups().values())
    options = FileOptions(batch_bytes, threads, allow_loss)
    if on_leader(lambda: is_dcp_folder(Path(path))):
        placed = load_dcp_folder(Path(path), model, optimizer, tables, options, strict=strict)
        return _lost(placed)
    layers = on_leader(lambda: read_saved(Path(path)))
    folder, record = layers[0]
    if not strict:
        tables = {key: table for key, table in tables.items() if key in record.tables}
    with skip_file_tables():
        tensors = TensorsLoad(folder, model, optimizer, strict=strict)
        if optimizer is not None and not record.has_optimizer:
            raise ValueError(
                f"The checkpoint {folder} was saved without an optimizer: load it without one."
            )
        check_tables(folder, record.tables, tables)
        # If the load can be undone, files are verified while they are loaded: one read suffices.
        fresh = all(on_every_rank(lambda: are_untouched(tables)))
        with reported(f"Verifying {folder.name}"):
            on_every_rank(lambda: _verify(layers, list(tables), options, but_entries=fresh))
        loads: list[GroupLoad] = []
        opening = dataclasses.replace(options, verify=fresh)
        on_every_rank(lambda: loads.extend(open_tables(layers, tables, opening)))
        on_every_rank(lambda: [group.load.check() for group in loads])
        if optimizer is not None:
            rates = record.learning_rates
            on_every_rank(lambda: check_learning_rates(optimizer, rates, folder / RECORD))
        tensors.check(record.files)
        total = sum(group.load.bytes for group in loads) + tensors.bytes
        with reported(f"Loading {folder.name}", total):
            loaded = False
            try:
                of_ranks = on_every_rank(
                    lambda: [shard for group in loads for shard in group.run()]
                )
                loaded = True
            except ValueError:
                if fresh:  # finds which file is wrong, and why
                    on_every_rank(lambda: _verify(layers, list(tables), options))
                raise
            finally:
                if fresh and not loaded:
                    for group in loads:
                        group.load.undo()
            tensors.run()
    if optimizer is not None:
        put_learning_rates(optimizer, record.learning_rates)
    placed = {}
    for name, held in itertools.chain.from_iterable(of_ranks):
        placed[name] = placed.get(name, LoadCounts()) + held
    return _lost(placed)


def _lost(placed: Mapping[str, LoadCounts]) -> int:
    """The number of lost entries over all ranks and tables. Rank 0 warns if there are any."""
    if this_rank() == 0:
        warn_of_losses(placed)
    return sum(result.lost for result in placed.values())


def _verify(
    layers: Layers, tables: list[str], options: FileOptions, *, but_entries: bool = False
) -> None:
    """Verifies this rank's share of all files, or of the files that a load does not verify."""
    folder, record = layers[0]
    saved_keys = [key for key in tables if key in record.tables]
    of_tables = share_of_rank(files_to_verify(layers, saved_keys, but_entries=but_entries))
    of_tensors = share_of_rank(sorted(record.files))
    with ThreadPoolExecutor(options.threads) as pool:
        futures = [
            (
                record.files[name].bytes,
                pool.submit(verify_file, folder / name, record.files[name]),
            )
            for name in of_tensors
        ]
        futures += [
            (
                file_size(saved.folder / name),
                pool.submit(registry.get(backend).verify_file, saved, name, options),
            )
            for backend, saved, name in of_tables
        ]
        expect(sum(size for size, _ in futures))
        for size, future in futures:
            future.result()
            advance(size)
