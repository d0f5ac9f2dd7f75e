"""Publishes the rows of a model's hash tables to a Redis server, and updates them with deltas.

    apt install redis-server; pip install redis
    python examples/serving/redis_publish.py deltas/ --rows int8 --follow 1

``deltas/`` is the folder of a ``DeltaWriter``. The row of an id is the value of the key
``PREFIX:GENERATION:TABLE:ID``; :func:`look_up` reads rows. ``PREFIX:version`` is a hash with the
``generation``, which is the number of the rows' base, and the ``number`` and ``digest`` of the
newest published checkpoint. Deltas change rows in place, so a reader may see rows of two versions
while a delta is published. A new base is written beside the old rows, and readers switch in one
step.

It needs neither TorchRec nor FBGEMM.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import redis
import torch
from torch import Tensor

from torchrec_hkv.checkpoint.chain import Chain, digest_of
from torchrec_hkv.serving import row_formats
from torchrec_hkv.serving.checkpoints import Checkpoint

#: Number of commands that are sent before waiting for their answers.
PIPELINE = 10_000


class Publisher:
    """Writes a chain to a server.

    Args:
        server: the server.
        chain: folder of a ``DeltaWriter``.
        row_format: format of the rows.
        prefix: prefix of all keys.
        unit: unit of quantised rows; values must be at most 65504 units in magnitude.
    """

    def __init__(
        self,
        server: redis.Redis,
        chain: Path,
        row_format: row_formats.RowFormat = "fp32",
        prefix: str = "torchrec_hkv",
        unit: float = 2.0**-10,
    ) -> None:
        self._server, self._chain, self._prefix = server, chain, prefix
        self._format, self._unit = row_format, unit

    def publish(self) -> int:
        """Writes the checkpoints that the server lacks; returns their number."""
        newest = Chain(self._chain).newest()
        if newest is None:
            return 0
        folders = [folder for folder, _ in reversed(Chain(self._chain, newest.number).layers())]
        digests = [digest_of(folder) for folder in folders]
        version = self._server.hgetall(f"{self._prefix}:version")
        known = version.get(b"digest", b"").decode()
        first = digests.index(known) + 1 if known in digests else 0
        for folder, digest in zip(folders[first:], digests[first:], strict=True):
            self._write(folder, digest, version.get(b"generation"))
            version = self._server.hgetall(f"{self._prefix}:version")
        return len(folders) - first

    def _write(self, folder: Path, digest: str, generation: bytes | None) -> None:
        checkpoint = Checkpoint(folder)
        number = int(folder.name.rpartition("-")[2])
        before = None
        if not checkpoint.is_delta:
            before, generation = generation, b"%d" % number
        for table in checkpoint.record.tables:
            if checkpoint.has_files(table):
                key = f"{self._prefix}:{generation.decode()}:{table}"
                for ids, rows, left in _changes(checkpoint, table):
                    self._set(key, ids, rows)
                    self._remove(f"{key}:{id_}" for id_ in left.tolist())
        self._server.hset(
            f"{self._prefix}:version",
            mapping={"number": number, "digest": digest, "generation": generation},
        )
        if before not in (None, generation):
            self._remove(self._server.scan_iter(f"{self._prefix}:{before.decode()}:*", PIPELINE))

    def _set(self, key: str, ids: Tensor, rows: Tensor) -> None:
        for of_ids, of_rows in zip(ids.split(PIPELINE), rows.split(PIPELINE), strict=True):
            data = row_formats.to_bytes(of_rows, self._format, self._unit).numpy()
            values = {f"{key}:{id_}": data[n].tobytes() for n, id_ in enumerate(of_ids.tolist())}
            if values:
                self._server.mset(values)

    def _remove(self, keys: Iterator[str]) -> None:
        part: list[str] = []
        for key in keys:
            part.append(key)
            if len(part) == PIPELINE:
                self._server.unlink(*part)
                part.clear()
        if part:
            self._server.unlink(*part)


def _changes(checkpoint: Checkpoint, table: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields (ids, their rows, ids that left)."""
    none = torch.empty(0, dtype=torch.int64)
    if not checkpoint.is_delta:
        yield from ((ids, rows, none) for ids, rows in checkpoint.entries(table))
        return
    parts, left = checkpoint.changes(table)
    if len(parts) > 1:
        raise ValueError(
            f"table {table!r} is sharded by columns, and its deltas hold parts of rows: write "
            "bases only, or shard it by rows."
        )
    yield parts[0].ids, parts[0].rows, left


def look_up(
    server: redis.Redis,
    table: str,
    ids: Sequence[int],
    dim: int,
    row_format: row_formats.RowFormat = "fp32",
    prefix: str = "torchrec_hkv",
    unit: float = 2.0**-10,
) -> Tensor:
    """Returns the rows of ids, ``[n, dim]``; zeros for ids that the server lacks."""
    generation = server.hget(f"{prefix}:version", "generation").decode()
    found = server.mget([f"{prefix}:{generation}:{table}:{id_}" for id_ in ids])
    rows = torch.zeros(len(ids), dim)
    for row, data in zip(rows, found, strict=True):
        if data is not None:
            stored = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            row.copy_(row_formats.from_bytes(stored[None], row_format, dim, unit)[0])
    return rows


def main() -> None:
    """Parses arguments and publishes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("deltas", type=Path, help="folder of a DeltaWriter")
    parser.add_argument("--url", default="redis://localhost:6379/0")
    parser.add_argument("--prefix", default="torchrec_hkv")
    parser.add_argument("--rows", choices=row_formats.ROW_FORMATS, default="fp32")
    parser.add_argument(
        "--unit", type=float, default=2.0**-10, help="of rows of int8 and int4 (%(default)s)"
    )
    parser.add_argument(
        "--follow",
        type=float,
        metavar="SECONDS",
        help="keep following the chain, and look at it this often",
    )
    given = parser.parse_args()
    server = redis.Redis.from_url(given.url)
    publisher = Publisher(server, given.deltas, given.rows, given.prefix, given.unit)
    while True:
        began = time.monotonic()
        if number := publisher.publish():
            print(f"{number} checkpoints in {time.monotonic() - began:.2f} s", flush=True)
        if given.follow is None:
            return
        time.sleep(given.follow)


if __name__ == "__main__":
    main()
