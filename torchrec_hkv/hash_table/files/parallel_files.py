"""Reads the files of a saved shard side by side and fills a table from all of them at once.

Each file has entries from the whole table, in the order of their slots. Reading one file after the
other would pass through nearly all of the table's memory once for each file, for few entries each
time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from torch import Tensor

from torchrec_hkv.hash_table.files.part_reader import PartReader, Read, read_and_check
from torchrec_hkv.hash_table.files.read_checks import ShardCheck
from torchrec_hkv.hash_table.files.saved_part import SavedPart
from torchrec_hkv.hash_table.files.shard_files import Field, ShardReader, Staging, entry_bytes
from torchrec_hkv.progress import advance

# Rounds whose entries are in memory at a time: the one being inserted, those that are read ahead,
# and one for what is converted.
_AHEAD = 2
_ROUNDS = _AHEAD + 2
# Number of threads for each requested thread: a thread does not read while it checks what it has
# read, and disks are faster with many reads at a time.
_THREADS = 3
# Number of files that are read side by side, and bytes of each file in a round: small reads are
# slow.
_FILES, PIECE_BYTES = 16, 1 << 20
# The first and the last round are each split into this many short ones.
_SHORT = 4


def can_read_in_parallel(reader: PartReader, part: SavedPart) -> bool:
    """Whether a load takes all entries of the shard's files."""
    return len(part.layers) == 1 and not any(others for *_, others in reader.shards(part))


def rounds(
    reader: PartReader, part: SavedPart, min_bytes: int
) -> Iterator[list[dict[str, Tensor]]]:
    """The entries in a shard for which :func:`can_read_in_parallel` holds. Yields one batch of
    each of several files at a time, from about the same slots on. Batches are valid until the next.

    Args:
        reader: reader of the shard.
        part: the shard.
        min_bytes: least number of bytes of an entry, in files or converted.

    Raises:
        ValueError: a file is missing or cut short or, with ``reader.verify``, damaged.
    """
    width = max(entry_bytes(part.fields), min_bytes)
    size = max(1, reader.batch_bytes // (_ROUNDS * width))  # entries of a round
    maximum = max(1, min(_FILES, size * width // PIECE_BYTES))
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(_THREADS * reader.threads))
        files: list[_File] = []
        for layer, path, shard, _ in reader.shards(part):
            if shard.entries == 0:
                continue
            check = reader.check_of(part, layer, path, shard)
            file = _File(
                stack.enter_context(ShardReader(path, part.fields, shard)), shard.entries, check
            )
            files.append(file)
        groups = -(-len(files) // maximum)
        for group in range(groups):
            yield from _of_files(files[group::groups], part.fields, size, pool, reader.pin)


class _File:
    """A file that is read in rounds."""

    def __init__(self, reader: ShardReader, entries: int, check: ShardCheck | None) -> None:
        self._reader, self._entries, self._check = reader, entries, check

    def maximum(self, count: int) -> int:
        """The largest number of entries in one of ``count`` rounds."""
        return -(-self._entries // count)

    def submit(
        self, pool: Executor, part: tuple[int, int], whole: int, staging: Staging
    ) -> Future[Read] | None:
        """Reads the entries of a round, from part ``part[0]`` to ``part[1]`` of ``whole`` equal
        parts of the file; None if it has none."""
        begin, end = (self._entries * mark // whole for mark in part)
        if begin == end:
            return None
        return pool.submit(read_and_check, self._reader, begin, end - begin, staging, self._check)

    def take(self, future: Future[Read]) -> dict[str, Tensor]:
        """The entries of a round. Call it in the order of rounds."""
        batch, result = future.result()
        if self._check is not None and result is not None:
            self._check.add(result, len(batch["ids"]))
            if not result.is_sound:
                # At the end of the file, the check knows whether it is damaged, and raises.
                return {name: tensor[:0] for name, tensor in batch.items()}
        return batch


def _marks(count: int) -> list[int]:
    """The beginnings of rounds, and the end. Of ``count`` equal rounds, the first is cut into short
    ones, so that the first entries arrive early, and so is the last, so that few entries are
    inserted at the end, when nothing is read."""
    whole = range(0, _SHORT * count + 1, _SHORT)
    return sorted({*whole, *range(_SHORT), *range(whole[-2], whole[-1])})


def _of_files(
    files: Sequence[_File], fields: Sequence[Field], size: int, pool: Executor, pin: bool
) -> Iterator[list[dict[str, Tensor]]]:
    entries = sum(file.maximum(1) for file in files)
    # A short file has no entries in some of the rounds.
    count = min(-(-entries // size), max(file.maximum(1) for file in files))
    free = [
        [Staging(fields, file.maximum(count), pin) for file in files]
        for _ in range(min(_AHEAD + 1, count))
    ]
    ahead: list[tuple[list[Future[Read] | None], list[Staging]]] = []

    def take() -> Iterator[list[dict[str, Tensor]]]:
        futures, stagings = ahead.pop(0)
        batches = [
            file.take(future)
            for file, future in zip(files, futures, strict=True)
            if future is not None
        ]
        if batches:  # a short round may have none
            yield batches
        advance(sum(len(batch["ids"]) for batch in batches) * entry_bytes(fields))
        free.append(stagings)

    marks = _marks(count)
    for part in itertools.pairwise(marks):
        if len(ahead) == _AHEAD + 1 or not free:
            yield from take()
        stagings = free.pop()
        futures = [
            file.submit(pool, part, marks[-1], staging)
            for file, staging in zip(files, stagings, strict=True)
        ]
        ahead.append((futures, stagings))
    while ahead:
        yield from take()
