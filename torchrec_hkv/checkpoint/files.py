"""Saves and loads sharded models. A killed save never damages the previous checkpoint."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.saved import FileOptions, Placed, SavedFolder
from torchrec_hkv.checkpoint.agreement import Folder, agreed
from torchrec_hkv.checkpoint.chain import Chain, Link
from torchrec_hkv.checkpoint.dcp_folders import (
    is_dcp_folder,
    load_dcp_folder,
    refuse_dcp_folder,
)
from torchrec_hkv.checkpoint.learning_rates import (
    check_learning_rates,
    learning_rates,
    put_learning_rates,
)
from torchrec_hkv.checkpoint.optimizers import check_optimizer, optimizer_state
from torchrec_hkv.checkpoint.place import Place
from torchrec_hkv.checkpoint.record import RECORD, TENSORS, FileRecord, Record
from torchrec_hkv.checkpoint.tables import (
    GroupLoad,
    Layers,
    Trackers,
    are_untouched,
    check_tables,
    files_to_verify,
    open_tables,
    records_of,
    save_tables,
    saved_folders,
    warn_of_losses,
)
from torchrec_hkv.checkpoint.tensors import (
    TensorsLoad,
    check_savable,
    file_record,
    file_size,
    local_bytes,
    save_tensors,
    verify_file,
)
from torchrec_hkv.collective import on_every_rank, on_leader
from torchrec_hkv.hash_table.files.manifest import new_save_id, sync_folder
from torchrec_hkv.progress import advance, expect, reported
from torchrec_hkv.sharding.modules.collection import FoundTable, tables_with_files_aside
from torchrec_hkv.sharding.modules.open_lookups import collect_open_lookups
from torchrec_hkv.sharding.state.names import named_collections, named_tables
from torchrec_hkv.write_behind import STAGING_BYTES, SaveHandle, check_staging, wait_for_saves

#: Default memory limit of a save or a load on a rank, in bytes, on the host and on the GPU each.
BATCH_BYTES = 96 << 20
#: Default number of threads of a rank that write or read files.
THREADS = 4


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    *,
    batch_bytes: int = BATCH_BYTES,
    threads: int = THREADS,
    blocking: bool = True,
    staging_bytes: int = STAGING_BYTES,
    device_staging_bytes: int | None = None,
) -> SaveHandle | None:
    """Saves a model and an optimizer from all ranks; a collective call.

    Hash tables have files of their own, with optimizer states, scores, steps and counts of ids that
    are not admitted. They are written in bounded memory. :mod:`torch.distributed.checkpoint` writes
    everything else, stock tables included. The checkpoint is written to a folder beside ``path``,
    which is renamed when it is complete.

    Args:
        path: a folder that all ranks see. An earlier checkpoint there is replaced.
        model: a sharded model.
        optimizer: TorchRec's optimizer. Saved are the states of dense parameters and stock tables,
            and the learning rates of all parameters.
        batch_bytes: memory limit for hash tables on each rank, on the host and on the device each.
        threads: number of threads of each rank that write files.
        blocking: True: the call returns when everything is on the disk. False: it returns when
            everything has been copied, and threads write while training goes on. The content is
            that of the step of the call, bit for bit. Until the save has ended, ``path`` names the
            previous checkpoint, and other saves and loads wait.
        staging_bytes: with ``blocking=False``, host memory limit for copies on each rank, in
            addition to ``batch_bytes``. If they don't fit, the call waits for the disk and logs a
            warning.
        device_staging_bytes: with ``blocking=False``, limit of GPU memory for copies of hash
            tables on each rank. Further copies go to host memory. None: the free memory less a
            tenth of the GPU's memory.

    Returns:
        None; with ``blocking=False`` a handle. Its ``wait()`` waits for the end and raises errors;
        ``done()`` and ``progress`` tell how far the save is.

    Raises:
        ValueError: ``path`` or a folder beside it that the save needs holds something other than a
            checkpoint, a rank does not see the folder, the optimizer is not keyed, a number is not
            positive, the ranks were given different paths, or only some ranks were given an
            optimizer. Nothing is written then.
        RuntimeError: a rank could not write. What was written is removed.
        CheckpointException: :mod:`torch.distributed.checkpoint` could not write. What was written
            is removed.
    """
    tables = named_tables(model)

    def arguments() -> dict[str, Any]:
        check_optimizer(optimizer)
        FileOptions(batch_bytes, threads)
        check_blocking(blocking, staging_bytes, device_staging_bytes)
        Place(Path(path))
        return {
            "path": Folder.of(Path(path)),
            "optimizer": "None" if optimizer is None else "given",
            "blocking": blocking,
            "the list of the model's tables": list(tables),
        }

    agreed(arguments)
    wait_for_saves()
    options, place = FileOptions(batch_bytes, threads), Place(Path(path))
    handle = None
    if not blocking:
        handle = SaveHandle(place.path, staging_bytes, device_staging_bytes, threads)
    with saving(place, handle) as save:
        save_to(place, model, optimizer, tables, options, save)
    return handle


@dataclasses.dataclass
class Saving:
    """A save that has begun on all ranks.

    Attributes:
        handle: the handle of a non-blocking save, else None.
        last: ends the save when everything is written; called on all ranks. Its argument is the
            process group of the ranks' threads, or None in a blocking save.
    """

    handle: SaveHandle | None
    last: Callable[[dist.ProcessGroup | None], None] = lambda group: None


@contextlib.contextmanager
def saving(place: Place, handle: SaveHandle | None = None) -> Iterator[Saving]:
    """Prepares the folder that a save writes to, on all ranks, and removes it if the save fails.

    At the end :attr:`Saving.last` is called: at once, or by the thread of a non-blocking save.
    """
    try:
        token = on_leader(place.prepare)
    except BaseException as error:
        if handle is not None:
            handle.abort(error)
        raise
    if handle is not None and _rank() == 0:
        handle.on_error(place.discard)
    try:
        group = None if handle is None else thread_group()
        save = Saving(handle)
        on_every_rank(lambda: place.check_seen(token))
        on_leader(lambda: place.remove_token(token))
        yield save
        if handle is None:
            save.last(None)
    except BaseException as error:
        if handle is not None:
            handle.abort(error)
        elif _rank() == 0:
            place.discard()
        raise
    if handle is not None:
        handle.close(lambda error: _end(save, group, error))


def _end(save: Saving, group: dist.ProcessGroup | None, error: BaseException | None) -> None:
    """Ends a save on all ranks, unless one of them had an error."""

    def check() -> None:
        if error is not None:
            raise error

    on_every_rank(check, group)
    save.last(group)


def save_to(
    place: Place,
    model: nn.Module,
    optimizer: KeyedOptimizer | None,
    tables: dict[str, FoundTable],
    options: FileOptions,
    save: Saving,
    trackers: Trackers | None = None,
    link: Link | None = None,
) -> None:
    """Writes (or copies, if the save is non-blocking) all contents. Call it within :func:`saving`.

    Args:
        place: the place of the checkpoint.
        model: the sharded model.
        optimizer: the optimizer, or None.
        tables: the tables of the model.
        options: how to write the files.
        save: the save; its ``last`` is set.
        trackers: as for :func:`torchrec_hkv.checkpoint.tables.save_tables`.
        link: position in a chain; None for a single checkpoint.
    """
    save_id = on_leader(new_save_id)
    options = dataclasses.replace(options, save=save_id, handle=save.handle)
    state: dict[str, Any] = {}
    with tables_with_files_aside():
        state["model"] = model.state_dict()
    if optimizer is not None:
        state.update(optimizer_state(optimizer))
    of_ranks = on_every_rank(lambda: {} if optimizer is None else learning_rates(optimizer))
    rates = {name: rate for part in of_ranks for name, rate in part.items()}
    on_every_rank(lambda: check_savable(state))
    mine: dict[str, str] = {}
    of_tensors = local_bytes(state)
    with reported(f"Saving {place.path.name}", of_tensors):
        on_every_rank(lambda: mine.update(save_tables(place.saving, tables, options, trackers)))
        save_tensors(place.saving / TENSORS, state, save.handle)
        advance(of_tensors)
    has_optimizer, world_size = optimizer is not None, _world_size()

    def finish(group: dist.ProcessGroup | None) -> None:
        folders = on_every_rank(lambda: saved_folders(place.saving, mine), group)
        names = on_leader(lambda: sorted(os.listdir(place.saving / TENSORS)), group)
        own = _share(_tensor_files(names))
        recorded = on_every_rank(
            lambda: {name: file_record(place.saving / name) for name in own}, group
        )
        on_leader(lambda: commit(folders, recorded), group)

    def commit(
        folders: list[dict[str, SavedFolder]], recorded: list[dict[str, FileRecord]]
    ) -> None:
        files: dict[str, FileRecord] = {}
        for part in recorded:
            files.update(part)
        saved = {name: held for part in folders for name, held in part.items()}
        records = records_of(tables, saved)
        sync_folder(place.saving / TENSORS)
        record = Record(save_id, world_size, has_optimizer, rates, records, files)
        if link is not None:
            link.write(place.saving)
        record.write(place.saving)
        sync_folder(place.saving)
        place.commit()

    save.last = finish


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
            changed then. Only if entries find no slot although a table is less than 95 % full, and
            ids may not be left out, the hash tables are empty afterwards.
    """
    tables = named_tables(model)

    def arguments() -> dict[str, Any]:
        check_optimizer(optimizer)
        FileOptions(batch_bytes, threads, allow_loss)
        Place(Path(path))
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
        load_dcp_folder(Path(path), model, optimizer, tables, options, strict=strict)
        return 0
    layers = on_leader(lambda: read_saved(Path(path)))
    folder, record = layers[0]
    if not strict:
        tables = {key: table for key, table in tables.items() if key in record.tables}
    with tables_with_files_aside():
        tensors = TensorsLoad(folder, model, optimizer, strict=strict)
        if optimizer is not None and not record.has_optimizer:
            raise ValueError(
                f"The checkpoint {folder} was saved without an optimizer: load it without one."
            )
        check_tables(folder, record.tables, tables)
        # What can be undone is verified while it is loaded, so that it is read once.
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
                if fresh:  # says what is wrong with which file
                    on_every_rank(lambda: _verify(layers, list(tables), options))
                raise
            finally:
                if fresh and not loaded:
                    for group in loads:
                        group.load.undo()
            tensors.run()
    if optimizer is not None:
        put_learning_rates(optimizer, record.learning_rates)
    placed: dict[str, Placed] = {}
    for name, held in itertools.chain.from_iterable(of_ranks):
        placed[name] = placed.get(name, Placed()) + held
    if _rank() == 0:
        warn_of_losses(placed)
    return sum(held.lost for held in placed.values())


def check_blocking(blocking: bool, staging_bytes: int, device_staging_bytes: int | None) -> None:
    """Checks the arguments of a non-blocking save.

    Raises:
        ValueError: a value is out of range; the message names it.
    """
    if not isinstance(blocking, bool):
        raise ValueError(f"blocking is {blocking!r}, but must be True or False.")
    check_staging(staging_bytes, device_staging_bytes)


# The default process group, and the group for the threads of its saves.
_groups: list[dist.ProcessGroup] = []
# A group that still exists when the interpreter ends may abort it.
atexit.register(_groups.clear)


def thread_group() -> dist.ProcessGroup | None:
    """The process group for threads of saves; a collective call. A group of their own keeps their
    collective calls apart from those of training. None without a process group."""
    if not dist.is_initialized():
        return None
    if not _groups or _groups[0] is not dist.group.WORLD:
        _groups[:] = [dist.group.WORLD, dist.new_group(backend="gloo")]
    return _groups[1]


def read_saved(path: Path) -> Layers:
    """Folders and records of the checkpoint at a path, which may be in a chain or be a chain.

    Raises:
        ValueError: there is no checkpoint, or a checkpoint of the chain is missing or of another
            chain.
    """
    chain = Chain.at(path)
    if chain is not None:
        return chain.layers()
    if not (path / RECORD).is_file():
        refuse_dcp_folder(path)
    folder = Place(path).newest()
    return [(folder, Record.read(folder))]


def _verify(
    layers: Layers, tables: list[str], options: FileOptions, *, but_entries: bool = False
) -> None:
    """Verifies this rank's share of all files, or of those that a load does not verify itself."""
    folder, record = layers[0]
    known = [key for key in tables if key in record.tables]
    of_tables = _share(files_to_verify(layers, known, but_entries=but_entries))
    of_tensors = _share(sorted(record.files))
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


def _tensor_files(names: list[str]) -> list[str]:
    return [f"{TENSORS}/{name}" for name in names]


def _share(items: list[Any]) -> list[Any]:
    """This rank's share of items that the ranks process together."""
    if not dist.is_initialized():
        return items
    return items[dist.get_rank() :: dist.get_world_size()]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
