"""Saves sharded models. A killed save never damages the previous checkpoint."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_hkv.backends.save_types import FileOptions, SavedFolder
from torchrec_hkv.checkpoint.agreement import Folder, agreed
from torchrec_hkv.checkpoint.atomic_folder import AtomicFolder
from torchrec_hkv.checkpoint.chain import Link
from torchrec_hkv.checkpoint.defaults import BATCH_BYTES, THREADS
from torchrec_hkv.checkpoint.learning_rates import learning_rates
from torchrec_hkv.checkpoint.optimizers import check_optimizer, optimizer_state
from torchrec_hkv.checkpoint.record import TENSORS, FileRecord, Record
from torchrec_hkv.checkpoint.shard_save import Trackers, save_tables, saved_folders
from torchrec_hkv.checkpoint.table_records import records_of
from torchrec_hkv.checkpoint.tensors import check_savable, file_record, local_bytes, save_tensors
from torchrec_hkv.collective import on_every_rank, on_leader, share_of_rank, this_rank, world_size
from torchrec_hkv.file_sync import sync_folder
from torchrec_hkv.hash_table.files.manifest import new_save_id
from torchrec_hkv.progress import advance, reported
from torchrec_hkv.sharding.modules.collection import ShardedTable, skip_file_tables
from torchrec_hkv.sharding.state.names import named_tables
from torchrec_hkv.write_behind import STAGING_BYTES, SaveHandle, check_staging, wait_for_saves


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
        optimizer: TorchRec's optimizer. The save includes the states of dense parameters and stock
            tables, and the learning rates of all parameters.
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
            tables on each rank. Further copies go to host memory. None: the free memory, including
            memory that PyTorch caches, less a tenth of the GPU's memory.

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
        AtomicFolder(Path(path))
        return {
            "path": Folder.of(Path(path)),
            "optimizer": "None" if optimizer is None else "given",
            "blocking": blocking,
            "the list of the model's tables": list(tables),
        }

    agreed(arguments)
    wait_for_saves()
    options, place = FileOptions(batch_bytes, threads), AtomicFolder(Path(path))
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
def saving(place: AtomicFolder, handle: SaveHandle | None = None) -> Iterator[Saving]:
    """Prepares the folder that a save writes to, on all ranks, and removes it if the save fails.

    At the end :attr:`Saving.last` is called: at once, or by the thread of a non-blocking save.
    """
    try:
        token = on_leader(place.prepare)
    except BaseException as error:
        if handle is not None:
            handle.abort(error)
        raise
    if handle is not None and this_rank() == 0:
        handle.on_error(place.discard)
    try:
        group = None if handle is None else thread_group()
        save = Saving(handle)
        on_every_rank(lambda: place.check_visible(token))
        on_leader(lambda: place.remove_token(token))
        yield save
        if handle is None:
            save.last(None)
    except BaseException as error:
        if handle is not None:
            handle.abort(error)
        elif this_rank() == 0:
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
    place: AtomicFolder,
    model: nn.Module,
    optimizer: KeyedOptimizer | None,
    tables: dict[str, ShardedTable],
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
        trackers: as for :func:`torchrec_hkv.checkpoint.shard_save.save_tables`.
        link: position in a chain; None for a single checkpoint.
    """
    save_id = on_leader(new_save_id)
    options = dataclasses.replace(options, save=save_id, handle=save.handle)
    state: dict[str, Any] = {}
    with skip_file_tables():
        state["model"] = model.state_dict()
    if optimizer is not None:
        state.update(optimizer_state(optimizer))
    of_ranks = on_every_rank(lambda: {} if optimizer is None else learning_rates(optimizer))
    rates = {name: rate for part in of_ranks for name, rate in part.items()}
    on_every_rank(lambda: check_savable(state))
    local_files: dict[str, str] = {}
    of_tensors = local_bytes(state)
    with reported(f"Saving {place.path.name}", of_tensors):
        on_every_rank(
            lambda: local_files.update(save_tables(place.saving, tables, options, trackers))
        )
        save_tensors(place.saving / TENSORS, state, save.handle)
        advance(of_tensors)
    has_optimizer = optimizer is not None

    def finish(group: dist.ProcessGroup | None) -> None:
        folders = on_every_rank(lambda: saved_folders(place.saving, local_files), group)
        names = on_leader(lambda: sorted(os.listdir(place.saving / TENSORS)), group)
        rank_files = share_of_rank(_tensor_files(names))
        recorded = on_every_rank(
            lambda: {name: file_record(place.saving / name) for name in rank_files}, group
        )
        on_leader(lambda: commit(folders, recorded), group)

    def commit(
        folders: list[dict[str, SavedFolder]], recorded: list[dict[str, FileRecord]]
    ) -> None:
        files: dict[str, FileRecord] = {}
        for part in recorded:
            files.update(part)
        saved = {name: folder for part in folders for name, folder in part.items()}
        records = records_of(tables, saved)
        sync_folder(place.saving / TENSORS)
        record = Record(save_id, world_size(), has_optimizer, rates, records, files)
        if link is not None:
            link.write(place.saving)
        record.write(place.saving)
        sync_folder(place.saving)
        place.commit()

    save.last = finish


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


def _tensor_files(names: list[str]) -> list[str]:
    return [f"{TENSORS}/{name}" for name in names]
