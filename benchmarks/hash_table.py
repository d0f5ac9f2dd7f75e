"""Operations of ``HashTable``, one a row, over load factor and dim, in 2^30 ids a second.

    python -m benchmarks.hash_table --out benchmarks/results/hash_table.csv

``insert_and_evict`` waits for the device to trim what it returns, so that its figure includes the
host's part.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.environment import write_csv
from benchmarks.timing import median_ms
from torchrec_hkv import HashTable
from torchrec_hkv.hash_table import Uniform


class Ids:
    """Ids 0, 1, … hashed over all of int64: those below ``seen`` have been inserted."""

    def __init__(self, device: torch.device, per_call: int) -> None:
        self.device = device
        self.per_call = per_call
        self.seen = 0

    def hashed(self, numbers: Tensor) -> Tensor:
        """A bijection of int64."""
        x = numbers * -7046029254386353131
        x = (x ^ (x >> 29)) * -4658895280553007687
        return x ^ (x >> 32)

    def new(self, n: int) -> Tensor:
        """Ids never given before."""
        first, self.seen = self.seen, self.seen + n
        return self.hashed(torch.arange(first, self.seen, device=self.device))

    def old(self, n: int, newest: int) -> Tensor:
        """Random ones of the newest ids."""
        low = max(0, self.seen - newest)
        return self.hashed(torch.randint(low, self.seen, (n,), device=self.device))

    def mixed(self, present: float, newest: int) -> Tensor:
        """``present`` of the ids old, the others new, shuffled."""
        n = int(present * self.per_call)
        ids = torch.cat([self.old(n, newest), self.new(self.per_call - n)])
        return ids[torch.randperm(len(ids), device=self.device)]


def operations(
    table: HashTable, rows: Tensor
) -> Iterator[tuple[str, float, Callable[[Tensor], object]]]:
    """Name, share of ids that are present, call."""
    yield "find slots", 1.0, table.find_slots
    yield "find rows", 1.0, table.find
    yield "find slots, score written", 1.0, table.find_or_insert_slots
    yield "find_or_insert slots", 0.6, table.find_or_insert_slots
    yield "find_or_insert rows", 0.6, table.find_or_insert
    yield "insert_or_assign", 0.6, lambda ids: table.insert_or_assign(ids, rows)
    yield "insert_and_evict", 0.6, lambda ids: table.insert_and_evict(ids, rows)


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    """One row a dim, load factor and operation."""
    device = torch.device(args.device)
    results = []
    for dim in args.dims:
        table = HashTable(dim, args.capacity, device=device, initializer=Uniform(-0.05, 0.05))
        ids = Ids(device, args.ids)
        rows = torch.randn(args.ids, dim, device=device)
        for load in args.loads:
            target = int(load * table.capacity) if load < 1 else int(1.5 * table.capacity)
            while ids.seen < target:
                table.find_or_insert_slots(ids.new(min(args.ids, target - ids.seen)))
            # Ids that are certainly there: evictions take the oldest.
            newest = int(0.8 * table.capacity)
            for name, present, call in operations(table, rows):
                inputs = [ids.mixed(present, newest) for _ in range(args.calls + 2)]
                ms = median_ms(call, inputs, device)
                result = {
                    "operation": name,
                    "dim": dim,
                    "capacity": table.capacity,
                    "load_factor": round(table.load_factor, 3),
                    "present": present,
                    "ids": args.ids,
                    "ms": round(ms, 4),
                    "giga_ids_per_s": round(args.ids / ms / 1e-3 / 2**30, 3),
                }
                print(", ".join(f"{key} {value}" for key, value in result.items()), flush=True)
                results.append(result)
        del table
    return results


def main() -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--capacity", type=int, default=1 << 26)
    parser.add_argument("--ids", type=int, default=1 << 20, help="ids a call")
    parser.add_argument("--calls", type=int, default=9, help="timed calls an operation")
    parser.add_argument("--dims", type=int, nargs="+", default=[64])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.75, 0.95, 1.0])
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args()
    results = measure(args)
    if args.out:
        write_csv(args.out, results)


if __name__ == "__main__":
    main()
