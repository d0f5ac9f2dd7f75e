"""Reads the entries of some owner buckets from saved shards; threads read ahead."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from torchrec_hkv.hash_table.files.layers import SlotFilter
from torchrec_hkv.hash_table.files.manifest import OWNERS
from torchrec_hkv.hash_table.files.manifest_parts import ShardFile
from torchrec_hkv.hash_table.files.read_checks import BatchCheck, ShardCheck
from torchrec_hkv.hash_table.files.saved_part import SavedPart
from torchrec_hkv.hash_table.files.shard_files import ShardReader, Staging, entry_bytes
from torchrec_hkv.hash_table.routing import owner_rank
from torchrec_hkv.progress import advance

# Number of batches besides those that are read ahead: the one being inserted, and the tensors
# selected and converted from it.
_COPIES = 3

#: Entries, and the result of checking them.
Read = tuple[dict[str, Tensor], BatchCheck | None]


def read_and_check(
    reader: ShardReader, first: int, n: int, staging: Staging, check: ShardCheck | None
) -> Read:
    """Reads entries, and looks at them if there is a check."""
    batch = reader.read(first, n, staging)
    return batch, None if check is None else check.check_batch(batch)


@dataclasses.dataclass(frozen=True)
class PartReader:
    """Reads the entries of some owner buckets from shards of a saved table.

    Attributes:
        owners: range ``[first, end)`` of the owner buckets.
        batch_bytes: host memory limit of :meth:`batches`.
        threads: number of threads that read files.
        verify: whether files are verified while they are read.
        pin: whether batches are in pinned memory.
    """

    owners: tuple[int, int]
    batch_bytes: int
    threads: int
    verify: bool
    pin: bool

    def count(self, part: SavedPart) -> int:
        """Number of entries in a shard; reads at most their ids."""
        if part.earlier and self._covers(part.owners):
            return part.manifest.total_entries
        count = 0
        slots = SlotFilter(part.layers)
        for layer, path, shard, has_others in self.shards(part):
            if not has_others and not part.earlier:
                count += shard.entries
                continue
            fields = [field for field in part.fields if field.name in ("ids", "slots")]
            staging = Staging(fields, min(shard.entries, 1 << 20))
            with ShardReader(path, part.fields, shard) as reader:
                for batch in reader.batches(staging):
                    picked = slots.pick(layer, batch["slots"])
                    ids = batch["ids"] if picked is None else batch["ids"][picked]
                    count += int(self._is_of_owners(ids).sum()) if has_others else len(ids)
        return count

    def batches(self, part: SavedPart, min_bytes: int) -> Iterator[dict[str, Tensor]]:
        """The entries in a shard; each batch is valid until the next.

        Args:
            part: the shard.
            min_bytes: least number of bytes of an entry, in files or converted.

        Raises:
            ValueError: a file is missing or cut short or, with ``verify``, damaged.
        """
        fields = part.fields
        width = max(entry_bytes(fields), min_bytes)
        size = max(1, self.batch_bytes // ((self.threads + _COPIES) * width))
        shards = [shard for _, manifest in part.layers for shard in manifest.shards]
        size = min(size, max((shard.entries for shard in shards), default=1))
        slots = SlotFilter(part.layers)
        with contextlib.ExitStack() as stack:
            free = [Staging(fields, size, self.pin) for _ in range(self.threads + 1)]
            pool = stack.enter_context(ThreadPoolExecutor(self.threads))
            ahead: list[tuple[Future[Read], Staging, int, bool, ShardCheck | None]] = []

            def take() -> Iterator[dict[str, Tensor]]:
                future, staging, layer, has_others, check = ahead.pop(0)
                batch, result = future.result()
                if check is not None and result is not None:
                    check.add(result, len(batch["ids"]))
                picked = slots.pick(layer, batch["slots"])
                if has_others:
                    owned = self._is_of_owners(batch["ids"])
                    picked = owned if picked is None else picked & owned
                if picked is not None:
                    batch = {name: tensor[picked] for name, tensor in batch.items()}
                yield batch
                advance(len(batch["ids"]) * entry_bytes(fields))
                free.append(staging)

            for layer, path, shard, has_others in self.shards(part):
                reader = stack.enter_context(ShardReader(path, fields, shard))
                check = self.check_of(part, layer, path, shard)
                for first in range(0, shard.entries, size):
                    if len(ahead) == self.threads:
                        yield from take()
                    staging = free.pop()
                    n = min(size, shard.entries - first)
                    future = pool.submit(read_and_check, reader, first, n, staging, check)
                    ahead.append((future, staging, layer, has_others, check))
            while ahead:
                yield from take()

    def check_of(
        self, part: SavedPart, layer: int, path: Path, shard: ShardFile
    ) -> ShardCheck | None:
        """A check of a file of :meth:`shards`; None if files are not verified."""
        if not self.verify:
            return None
        return ShardCheck(path, part.layers[layer][1], shard, part.owners)

    def shards(self, part: SavedPart) -> Iterator[tuple[int, Path, ShardFile, bool]]:
        """Files of a shard that may hold ids of the owner buckets: for each, the index of the
        layer, the path, its description, and whether it may also hold other ids."""
        for layer, (folder, manifest) in enumerate(part.layers):
            for shard in manifest.shards:
                # The files of a shard cover all owner buckets, even those that the shard did not
                # hold.
                owners = (
                    max(shard.owner_begin, part.owners[0]),
                    min(shard.owner_end, part.owners[1]),
                )
                if max(owners[0], self.owners[0]) < min(owners[1], self.owners[1]):
                    yield layer, folder / shard.file, shard, not self._covers(owners)

    def _covers(self, owners: tuple[int, int]) -> bool:
        return self.owners[0] <= owners[0] and owners[1] <= self.owners[1]

    def _is_of_owners(self, ids: Tensor) -> Tensor:
        owner = owner_rank(ids, OWNERS)
        return (owner >= self.owners[0]) & (owner < self.owners[1])
