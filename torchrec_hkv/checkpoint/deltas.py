"""Saves a model repeatedly, each time only what changed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_hkv.backends.save_types import FileOptions
from torchrec_hkv.checkpoint.agreement import Folder, agreed
from torchrec_hkv.checkpoint.atomic_folder import AtomicFolder
from torchrec_hkv.checkpoint.chain import Chain, Link, digest_of
from torchrec_hkv.checkpoint.defaults import BATCH_BYTES, THREADS
from torchrec_hkv.checkpoint.layers import read_saved
from torchrec_hkv.checkpoint.model_load import load
from torchrec_hkv.checkpoint.model_save import check_blocking, save_to, saving
from torchrec_hkv.checkpoint.optimizers import check_optimizer
from torchrec_hkv.checkpoint.record import LINK, RECORD
from torchrec_hkv.checkpoint.shard_save import Trackers, start_trackers
from torchrec_hkv.collective import on_every_rank, on_leader
from torchrec_hkv.sharding.state.names import named_tables
from torchrec_hkv.write_behind import STAGING_BYTES, SaveHandle, wait_for_saves


class DeltaWriter:
    """Writes a base, which is a complete checkpoint, and then deltas to a folder.

    A delta holds the entries of hash tables that training has looked up since the previous write
    (rows, states, scores and steps) and the ids that left. It holds everything else completely:
    stock tables, Tensor-Train tables, dense parameters and optimizers. :func:`load` of the folder
    loads the newest write; :func:`load` of ``folder / "delta-000003"`` loads that write. Both work
    on any number of ranks.

    Training does no extra work and is as fast as without a writer. From the first write on, a rank
    uses 9 bytes of host memory for each slot of its hash tables.

    The first write of a writer is a base. If the folder already holds a chain, the base gets the
    next number. After :meth:`resume`, the first write is a delta if the number of ranks and the
    sharding are those of the chain. If rows have changed without a lookup, for example by
    :func:`load` or :func:`import_rows`, the next delta holds the whole table.

    Args:
        model: a sharded model.
        folder: a folder that all ranks see; created if it doesn't exist.
        optimizer: as for :func:`save`.
        every_steps: number of calls of :meth:`step` from one write to the next; None: writes don't
            depend on it.
        every_seconds: seconds from one write to the next by rank 0's clock; a write may come some
            steps later. None: writes don't depend on it.
        base_every: number of writes from one base to the next; None: only the first write is a
            base.
        keep_bases: number of bases to keep. A new base removes older ones and their deltas. None
            keeps all.
        states: whether optimizer states of hash tables are written. Without them, what is loaded
            can be served, but training starts with new states.
        row_dtype: dtype of the saved rows of hash tables, in bases and deltas: ``torch.float16`` or
            ``torch.bfloat16`` rounds rows of 32 bits; ``torch.int8`` saves codes of 8 bits and one
            scale a row. None saves all bits.
        compression: ``"zstd"`` compresses the entries of hash tables with the package
            ``zstandard``. Loading them needs the package, too.
        batch_bytes: as for :func:`save`.
        threads: as for :func:`save`.
        blocking: whether :meth:`step` returns when everything is on the disk (True), or when
            everything has been copied (False). :meth:`write` has its own argument.
        staging_bytes: as for :func:`save`.
        device_staging_bytes: as for :func:`save`.

    Raises:
        ValueError: a number is not positive, an option has another value than above, the folder is
            a file or a checkpoint, the optimizer is not keyed, or ``zstandard`` is needed and not
            installed.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | os.PathLike[str],
        optimizer: KeyedOptimizer | None = None,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        base_every: int | None = None,
        keep_bases: int | None = None,
        states: bool = True,
        row_dtype: torch.dtype | None = None,
        compression: Literal["zstd"] | None = None,
        batch_bytes: int = BATCH_BYTES,
        threads: int = THREADS,
        blocking: bool = True,
        staging_bytes: int = STAGING_BYTES,
        device_staging_bytes: int | None = None,
    ) -> None:
        numbers = {"every_steps": every_steps, "base_every": base_every, "keep_bases": keep_bases}
        for what, number in numbers.items():
            is_count = isinstance(number, int) and not isinstance(number, bool) and number >= 1
            if number is not None and not is_count:
                raise ValueError(f"{what} is {number!r}, but must be an integer, at least 1.")
        if every_seconds is not None and not every_seconds > 0:
            raise ValueError(f"every_seconds is {every_seconds!r}, but must be positive.")
        check_optimizer(optimizer)
        self._staging = staging_bytes, device_staging_bytes
        check_blocking(blocking, *self._staging)
        self._blocking = blocking
        self._options = FileOptions(
            batch_bytes, threads, states=states, row_dtype=row_dtype, compression=compression
        )
        self._root = Path(folder)
        _check_root(self._root)
        self._model, self._optimizer = model, optimizer
        self._every_steps, self._every_seconds = every_steps, every_seconds
        self._base_every, self._keep_bases = base_every, keep_bases
        self._trackers: Trackers = {}
        self._last: tuple[Link, str] | None = None  # None: the next write is a base
        self._deltas = 0  # since the last base
        self._timer = _Timer(every_seconds)
        self._steps = 0  # since the last write

    def step(self) -> Path | SaveHandle | None:
        """Counts a training step and writes if a write is due; a collective call.

        Returns:
            The result of :meth:`write`, or None if nothing was due.
        """
        self._steps += 1
        due = self._every_steps is not None and self._steps >= self._every_steps
        if not due and self._timer.is_due(self._steps):
            due = True
        return self.write() if due else None

    def resume(self, *, allow_loss: bool | None = None) -> int:
        """Loads the newest state of the folder like :func:`load`; a collective call.

        The next write is a delta if the number of ranks, the sharding, ``states`` and ``row_dtype``
        are those of the chain, and every entry found a slot. Otherwise it is a base: a delta names
        slots, and on other ranks entries are in other slots. Nobody else may write to the folder.

        Args:
            allow_loss: as for :func:`load`.

        Returns:
            Number of entries that found no slot, as :func:`load`.

        Raises:
            ValueError: as :func:`load`.
        """
        wait_for_saves()
        self._last = None
        tables = named_tables(self._model)
        options = self._options
        lost = load(
            self._root,
            self._model,
            self._optimizer,
            allow_loss=allow_loss,
            batch_bytes=options.batch_bytes,
            threads=options.threads,
        )
        layers = on_leader(lambda: read_saved(self._root))
        folder, record = layers[0]
        is_tracked = on_every_rank(
            lambda: lost == 0 and start_trackers(folder, record, tables, options, self._trackers)
        )
        if all(is_tracked):
            self._last = on_leader(self._name_newest)
            self._deltas = len(layers) - 1
        return lost

    def _name_newest(self) -> tuple[Link, str]:
        """Names the newest checkpoint of the chain in ``deltas.json``, because a killed writer may
        not have done it. Returns that checkpoint."""
        chain = Chain(self._root)
        chain.clear()
        folder, _ = chain.layers()[0]
        last = Link.read(folder), digest_of(folder)
        chain.name_newest(*last)
        return last

    def write(self, *, base: bool = False, blocking: bool | None = None) -> Path | SaveHandle:
        """Writes a delta or a base; a collective call.

        If a write is killed or fails, the chain before it stays complete. After a failed write, the
        next write is a base.

        Args:
            base: writes a base even if a delta is possible.
            blocking: True: the call returns when everything is on the disk. False: it returns when
                everything has been copied, and threads write while training goes on, as for
                :func:`save`; the next write waits for them. None: as the writer's ``blocking``.

        Returns:
            The folder of the checkpoint, or a handle whose ``wait()`` returns it.

        Raises:
            ValueError: a rank does not see the folder, the ranks were given different arguments, or
                another writer wrote to the folder; nothing is written. Also if ``row_dtype`` can't
                represent a value.
            RuntimeError: a rank could not write.
        """
        blocking = self._blocking if blocking is None else blocking
        wait_for_saves()
        tables = named_tables(self._model)
        given = {
            "folder": Folder.of(self._root),
            "base": base,
            "blocking": blocking,
            "optimizer": "None" if self._optimizer is None else "given",
            "base_every": self._base_every,
            "keep_bases": self._keep_bases,
            "states": self._options.states,
            "row_dtype": self._options.row_dtype,
            "compression": self._options.compression,
            "the list of the model's tables": list(tables),
        }

        def arguments() -> dict[str, Any]:
            check_blocking(blocking, *self._staging)
            return given

        agreed(arguments)
        full = self._base_every is not None and self._deltas + 1 >= self._base_every
        is_base = base or self._last is None or full
        previous = None if self._last is None else self._last[1]
        link = on_leader(lambda: self._next(is_base, previous))
        if is_base:
            for tracker in self._trackers.values():
                if tracker is not None:
                    tracker.forget()
        place = AtomicFolder(self._root / link.name)
        self._last = None  # unless the write succeeds
        handle = None
        if not blocking:
            handle = SaveHandle(place.path, *self._staging, self._options.threads)
        with saving(place, handle) as save:
            save_to(
                place,
                self._model,
                self._optimizer,
                tables,
                self._options,
                save,
                self._trackers,
                link,
            )
            save_last = save.last

            def finish(group: dist.ProcessGroup | None) -> None:
                save_last(group)
                self._last = link, on_leader(lambda: self._commit(link), group)

            save.last = finish
        self._deltas = 0 if is_base else self._deltas + 1
        self._steps = 0
        self._timer.begin()
        return place.path if handle is None else handle

    def _next(self, is_base: bool, previous: str | None) -> Link:
        _check_root(self._root)
        self._root.mkdir(parents=True, exist_ok=True)
        chain = Chain(self._root)
        number, newest = chain.next_number(), chain.newest()
        if self._last is None:
            chain.clear()
        elif newest is None or newest.digest != previous or number != newest.number + 1:
            raise ValueError(
                f"{self._root} has changed since {self._last[0].name} was written: write to a "
                "folder that no other writer uses, with a new DeltaWriter."
            )
        return Link(number, "base" if is_base else "delta", None if is_base else previous)

    def _commit(self, link: Link) -> str:
        digest = digest_of(self._root / link.name)
        chain = Chain(self._root)
        chain.name_newest(link, digest)
        if link.kind == "base" and self._keep_bases is not None:
            chain.keep_bases(self._keep_bases)
        return digest


class _Timer:
    """Tells when a time has passed by rank 0's clock. Ranks must agree, which costs a collective
    call, so the timer asks only a few times between two writes."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self.begin()

    def begin(self) -> None:
        self._began = time.monotonic()
        self._next_check = 1

    def is_due(self, steps: int) -> bool:
        if self._seconds is None or steps < self._next_check:
            return False
        passed = on_leader(lambda: time.monotonic() - self._began)
        remaining_steps = (self._seconds - passed) / max(passed, 1e-6) * steps
        self._next_check = steps + max(1, min(int(remaining_steps), steps))
        return passed >= self._seconds


def _check_root(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} is a file, but a chain of deltas is written to a folder.")
    for name, what in ((RECORD, "a checkpoint"), (LINK, "a checkpoint in a chain")):
        if (root / name).exists():
            raise ValueError(
                f"{root} is the folder of {what}: name a new folder, in which bases and deltas "
                "have folders of their own."
            )
