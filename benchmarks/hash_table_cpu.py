"""``HashTable`` on a CPU compared with ``std::unordered_map``, in one run on the same ids.

    python -m benchmarks.hash_table_cpu --out benchmarks/results/hash_table_cpu.csv

The comparison has one map per thread, from id to the address of a row in a preallocated slab; a
hash assigns ids to threads. New ids get the same initial rows on both sides. ``HashTable`` returns
slots. Both sides start with the same entries. A map evicts nothing: at load factor 1 it grows by
the ids that calls add, for which its buckets and slab have room; below 1, both sides erase each
call's new ids after it, untimed. The sides take turns. Medians are compared: of wall time, and of
the processor time of all threads, which other load affects less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.ids import IdPool
from benchmarks.unordered_map import UnorderedMaps, compiler_version
from torchrec_hkv import HashTable
from torchrec_hkv.hash_table import Uniform

NAME, INITIALIZER = "table", Uniform(-0.05, 0.05)
WARM_UP = 2
#: Key columns: a new run replaces rows with the same key in the file.
KEYS = ("operation", "dim", "capacity", "load_factor", "present", "ids", "threads")


def _timed(call: Callable[[Tensor], Tensor], ids: Tensor) -> tuple[float, float, Tensor]:
    """Returns (milliseconds of wall time, milliseconds of processor time, result)."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    result = call(ids)
    end, end_cpu = time.perf_counter(), time.process_time()
    return 1e3 * (end - begin), 1e3 * (end_cpu - begin_cpu), result


def _check_equal(
    table: HashTable, maps: UnorderedMaps, ids: Tensor, slots: Tensor, addresses: Tensor
) -> None:
    """Checks that all ids have a place, and a hundred ids the same rows on both sides."""
    if (slots < 0).any() or (addresses == 0).any():
        raise RuntimeError("an id has no row, but all should have one.")
    some = torch.randint(len(ids), (100,))
    rows = table.find(ids[some])[0]
    for row, address in zip(rows, addresses[some].tolist(), strict=True):
        if not torch.equal(row, maps.row(address)):
            raise RuntimeError("the two sides have different rows for one id.")


def _measure(
    table: HashTable, maps: UnorderedMaps, ids: IdPool, operation: str, args: argparse.Namespace
) -> dict[str, object]:
    present = {"find": 1.0, "find_or_insert": args.present}[operation]
    sides: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("hash_table", table.find_slots),
        ("unordered_map", maps.find),
    ]
    if operation == "find_or_insert":
        sides = [
            ("hash_table", lambda batch: table.find_or_insert_slots(batch)[0]),
            ("unordered_map", maps.find_or_insert),
        ]
    keep_load = table.load_factor < 0.99
    wall: dict[str, list[float]] = {name: [] for name, _ in sides}
    cpu: dict[str, list[float]] = {name: [] for name, _ in sides}
    load_before = os.getloadavg()[0]
    for turn in range(args.calls + WARM_UP):
        batch = ids.mixed(args.ids, present)
        results = {}
        for name, call in sides if turn % 2 else reversed(sides):
            passed, processor, results[name] = _timed(call, batch)
            if turn >= WARM_UP:
                wall[name].append(passed)
                cpu[name].append(processor)
        _check_equal(table, maps, batch, results["hash_table"], results["unordered_map"])
        if keep_load:
            maps.erase(ids.forget())
    ms = {name: statistics.median(samples) for name, samples in wall.items()}
    cpu_ms = {name: statistics.median(samples) for name, samples in cpu.items()}
    return {
        "operation": operation,
        "dim": table.dim,
        "capacity": table.capacity,
        "load_factor": round(table.load_factor, 3),
        "present": present,
        "ids": args.ids,
        "threads": args.threads,
        "hash_table_ms": round(ms["hash_table"], 2),
        "unordered_map_ms": round(ms["unordered_map"], 2),
        "factor": round(ms["unordered_map"] / ms["hash_table"], 2),
        "hash_table_cpu_ms": round(cpu_ms["hash_table"], 2),
        "unordered_map_cpu_ms": round(cpu_ms["unordered_map"], 2),
        "cpu_factor": round(cpu_ms["unordered_map"] / cpu_ms["hash_table"], 2),
        "system_load": round(load_before, 2),
        "compiler": compiler_version(),
    }


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields one row per load factor and operation."""
    table = HashTable(args.dim, args.capacity, name=NAME, initializer=INITIALIZER)
    ids = IdPool(table)
    for load in args.loads:
        ids.fill(load)
        entries = table.size
        growth = round((args.calls + WARM_UP) * args.ids * (1 - args.present))
        maximum = entries + growth
        maps = UnorderedMaps(args.threads, maximum, maximum, args.dim, NAME, INITIALIZER)
        for part in ids.all().split(1 << 20):
            maps.find_or_insert(part)
        if len(maps) != entries:
            raise RuntimeError(f"the maps hold {len(maps)} ids, the table {entries}.")
        for operation in ("find", "find_or_insert"):
            yield _measure(table, maps, ids, operation, args)
        maps.close()


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capacity", type=AtLeast(1), default=1 << 24)
    parser.add_argument("--dim", type=AtLeast(1), default=64)
    parser.add_argument("--ids", type=AtLeast(1), default=1 << 20, help="ids a call")
    parser.add_argument("--present", type=float, default=0.6, help="share of ids in the table")
    parser.add_argument("--calls", type=AtLeast(1), default=21, help="timed calls an operation")
    parser.add_argument("--threads", type=AtLeast(1), default=2)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    report(measure(args), args.out, KEYS)


if __name__ == "__main__":
    main()
