"""A sharded table that is trained, written as a chain of deltas and loaded, and a dictionary model.

Only the package reads and writes chains.
"""

from __future__ import annotations

import collections
import copy
import importlib.util
import os
import random
import shutil
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.chain_faults import killed_after, spoil
from tests.support.sharded_table import DIM, Shards, State
from tests.support.trained_shards import TrainedShards
from torchrec_hkv import checkpoint
from torchrec_hkv.backends import registry
from torchrec_hkv.backends.hkv.files import HashTablesLoad
from torchrec_hkv.backends.save_types import FileOptions
from torchrec_hkv.checkpoint.atomic_folder import AtomicFolder
from torchrec_hkv.checkpoint.chain import Chain, Link, digest_of
from torchrec_hkv.checkpoint.layers import files_to_verify, read_saved, saved_shards
from torchrec_hkv.checkpoint.record import (
    METADATA,
    TENSORS,
    Record,
    TableRecord,
    TableShardRecord,
    shard_folder,
)
from torchrec_hkv.checkpoint.tensors import file_record, verify_file
from torchrec_hkv.hash_table import files
from torchrec_hkv.hash_table.files.changes import ChangeTracker
from torchrec_hkv.hash_table.files.manifest import new_save_id
from torchrec_hkv.write_behind import SaveHandle

KEY = "ebc.embedding_bags.t"
SMALL = {"batch_bytes": 4096, "threads": 1}


class Sequence(TrainedShards):
    """A sharded table, its dictionary, and its chain.

    Args:
        seed: seed of all random choices.
        folder: folder for the chain.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.root = folder / "chain"
        self.did: collections.Counter[str] = collections.Counter()
        self.states: dict[int, State] = {}  # states of the chain, by number
        super().__init__(random.Random(seed))
        has_package = importlib.util.find_spec("zstandard") is not None
        self._compression = self.random.choice((False, False, has_package))

    def _begin(self, shards: Shards) -> None:
        super()._begin(shards)
        self._trackers = [ChangeTracker(group, 0) for group in shards.groups]
        self._previous: str | None = None  # digest; None if the next write is a base

    # -- writes -----------------------------------------------------------------------------------

    def write(self) -> None:
        self._write(None)
        self._check_newest()

    def write_behind(self) -> None:
        """Writes without blocking, and continues training meanwhile."""
        path = self._write_and_go_on()
        self.check()
        assert path.is_dir()
        self._check_newest()

    def _check_newest(self) -> None:
        """Checks that the newest checkpoint has the state at its time. A later delta may hide a
        wrong entry, so this is checked before the next write."""
        state = self.states[self._newest()]
        self._check_load(self.root, state, self.random.choice((1, 2, 3)))

    def _write_and_go_on(self) -> Path:
        go_on = threading.Event()
        handle = SaveHandle(self.root, self.random.choice((1 << 20, 1 << 30)), threads=2)
        handle.defer(go_on.wait)
        state = copy.copy(self.model)
        try:
            finish = self._begin_write(handle)
            for _ in range(2):
                self.train()
        except BaseException as error:
            go_on.set()
            handle.abort(error)
            raise
        written = []
        handle.close(lambda error: written.append(finish(state)))
        go_on.set()
        handle.wait(60)
        return written[0]

    def _write(self, handle: SaveHandle | None) -> None:
        self._begin_write(handle)(copy.copy(self.model))

    def _begin_write(self, handle: SaveHandle | None) -> Callable[[State], Path]:
        """Begins a write like :class:`checkpoint.DeltaWriter`, but without a model."""
        self.root.mkdir(exist_ok=True)
        chain = Chain(self.root)
        number = chain.next_number()
        is_base = self._previous is None
        if is_base:
            chain.clear()
        link = Link(number, "base" if is_base else "delta", self._previous)
        self._previous = None
        place, save_id = AtomicFolder(self.root / link.name), new_save_id()
        shard_bytes = self.random.choice((600, 2048, 2048))  # gives several files per shard
        place.remove_token(place.prepare())
        for index, group in enumerate(self.shards.groups):
            if is_base:
                self._trackers[index].forget()
            files.save(
                group,
                0,
                place.saving / shard_folder(KEY, index),
                save_id=save_id,
                tracker=self._trackers[index],
                shard_bytes=shard_bytes,
                compression=self._compression,
                handle=handle,
                **SMALL,
            )

        def finish(state: State) -> Path:
            backend, shards = registry.get("hkv"), []
            for index, owners in enumerate(self.shards.owners):
                folder = shard_folder(KEY, index)
                saved = backend.saved_folder(place.saving / folder)
                shards.append(
                    TableShardRecord(folder, owners, (0, DIM), saved.entries, saved.crc32)
                )
            (place.saving / TENSORS).mkdir()
            (place.saving / METADATA).write_text(link.name)
            record = Record(
                save_id,
                len(self.shards.groups),
                False,
                {},
                {KEY: TableRecord("hkv", {"eviction": self._eviction}, shards)},
                {METADATA: file_record(place.saving / METADATA)},
            )
            link.write(place.saving)
            record.write(place.saving)
            place.commit()
            digest = digest_of(place.path)
            chain.name_newest(link, digest)
            self._previous = digest
            self.states[link.number] = state
            return place.path

        return finish

    def keep(self) -> None:
        """Applies a retention."""
        if self.states:
            Chain(self.root).keep_bases(self.random.choice((1, 2)))
            names = Chain(self.root).names()
            self.states = {n: state for n, state in self.states.items() if n in names}

    # -- loads ------------------------------------------------------------------------------------

    def _load(self, path: Path, world_size: int) -> tuple[Shards, list[int]]:
        """Loads like :func:`checkpoint.load`, but without a model. Also returns the number of
        entries without a slot in each shard."""
        layers = read_saved(path)
        folder, record = layers[0]
        for name, file in record.files.items():
            verify_file(folder / name, file)
        options = FileOptions(4096, 1, True)
        for backend, saved, name in files_to_verify(layers, record.tables):
            registry.get(backend).verify_file(saved, name, options)
        shards, lost = self._make(world_size), []
        saved = saved_shards(layers, KEY)
        for group, owners in zip(shards.groups, shards.owners, strict=True):
            load = HashTablesLoad(group, {0: (KEY, self._rows, 0, saved, owners)}, options)
            load.check()
            lost.append(sum(placed.lost for placed in load.run().values()))
        return shards, lost

    def _newest(self) -> int | None:
        return max(self.states, default=None)

    def _check_load(self, path: Path, state: State, world_size: int) -> Shards:
        shards, lost = self._load(path, world_size)
        loaded = shards.state()
        assert loaded.items() <= state.items()
        assert len(loaded) + sum(lost) == len(state)
        for (group, ids, _), lost_ids in zip(shards.split(list(state)), lost, strict=True):
            # Only full shards drop entries.
            assert lost_ids == 0 or len(ids) > 0.95 * group.full_slots(0)
        return shards

    def load(self) -> None:
        """Loads any prefix of the chain with any number of ranks, without changing the table."""
        if self.states:
            number = self.random.choice(list(self.states))
            path = self.root / Chain(self.root).names()[number]
            self._check_load(path, self.states[number], self.random.choice((1, 2, 3, 5)))

    def resume(self) -> None:
        """Loads the newest state with another number of ranks, and continues from there."""
        if self.states:
            world_size = self.random.choice((1, 2, 3))
            shards = self._check_load(self.root, self.states[self._newest()], world_size)
            self._begin(shards)
            self.model = shards.state()
            self._see()

    def _see(self) -> None:
        """Like :meth:`checkpoint.DeltaWriter.resume`: deltas continue if possible."""
        folder, record = read_saved(self.root)[0]
        owners = [tuple(shard.owners) for shard in record.tables[KEY].shards]
        if len(self.model) < len(self.states[self._newest()]) or owners != self.shards.owners:
            return
        folders = [folder / shard_folder(KEY, index) for index in range(len(owners))]
        pairs = zip(self._trackers, folders, strict=True)
        if all(tracker.start_from(table_folder, True, None) for tracker, table_folder in pairs):
            last = Link.read(folder), digest_of(folder)
            Chain(self.root).clear()
            Chain(self.root).name_newest(*last)
            self._previous = last[1]
            self.did["resumed with deltas"] += 1

    def compact(self) -> None:
        """Compacts the chain into another folder, or to its new base."""
        if not self.states:
            return
        newest = self.states[self._newest()]
        if self.random.random() < 0.5:
            number = self.random.choice(list(self.states))
            path = self.root / Chain(self.root).names()[number]
            merged = self.root.parent / "merged"
            checkpoint.compact(path, merged, **SMALL)
            self._check_load(merged, self.states[number], self.random.choice((1, 2)))
            shutil.rmtree(merged)
            return
        base = checkpoint.compact(self.root, **SMALL)
        self.states[Link.read(base).number] = newest
        self._check_load(self.root, newest, self.random.choice((1, 2, 3)))
        self._previous = None  # a new writer is needed

    # -- faults -----------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kills a process during a blocking or non-blocking write, or a merge."""
        what = self.random.choice(("write", "behind", "compact"))
        if what == "compact" and not self.states:
            what = "write"
        calls = int(10 ** self.random.uniform(0.5, 3.7))
        before = set(Chain(self.root).names()) if self.root.exists() else set()
        state = copy.copy(self.model)
        child = os.fork()
        if child == 0:
            code = 1
            torch.set_num_threads(1)  # a forked child has no threads of a pool
            try:
                with killed_after(calls):
                    if what == "write":
                        self._write(None)
                    elif what == "behind":
                        self._write_and_go_on()
                    else:
                        checkpoint.compact(self.root, **SMALL)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL), (what, code)
        self.did[f"killed {what}" if code else f"not killed {what}"] += 1
        for number in set(Chain(self.root).names()) - before if self.root.exists() else ():
            # The process was killed after the new checkpoint was in its place.
            newest = self._newest()
            self.states[number] = self.states[newest] if what == "compact" else state
        self._previous = None
        if self.states:
            self._check_load(self.root, self.states[self._newest()], self.random.choice((1, 2, 3)))
            if self.random.random() < 0.5:
                self.resume()
        else:
            self._begin(self.shards)

    def damage(self) -> None:
        """Damages a bit, a length, a file or folders, checks the error, and undoes the damage."""
        if not self.states:
            return
        backup = self.root.parent / "backup"
        shutil.copytree(self.root, backup, symlinks=True)
        what = self.random.choice(("bit", "cut", "longer", "lost", "folder", "swapped", "doubled"))
        if not spoil(self.root, KEY, what, self.random):
            shutil.rmtree(backup)
            return
        self.did[f"damage: {what}"] += 1
        with pytest.raises(ValueError, match=r"."):  # no other error
            self._load(self.root, self.random.choice((1, 2, 3)))
        shutil.rmtree(self.root)
        backup.rename(self.root)
        self._check_load(self.root, self.states[self._newest()], 1)

    def do(self, name: str) -> None:
        """Runs one operation."""
        getattr(self, name)()
        self.did[name] += 1


#: Names of operations, repeated by their weights.
OPERATIONS = (
    *("train",) * 6,
    *("write",) * 4,
    "write_behind",
    "expire",
    "erase",
    *("assign",) * 2,
    "clear",
    "grow",
    "keep",
    *("load",) * 2,
    *("resume",) * 2,
    "compact",
    *("kill",) * 2,
    *("damage",) * 2,
)
