"""Replays of id logs: speed by format and sample, and errors of hit rates predicted from samples.

    python -m benchmarks replay --what speed --out benchmarks/results/replay_speed.csv
    python -m benchmarks replay --what error --out benchmarks/results/replay_error.csv

speed: replays one column of int64 ids of the first stream; ``m_lookups_s`` counts the lookups of
the whole log. Times include reading, but not writing the log. ``cpu_seconds`` is the processor time
of all threads, which other load affects less.

error: compares a replay of all ids with replays of samples, for each stream. Each draw renames the
ids, so that other ids are in the sample. All ids are replayed for each draw, because the hit rate
of ``adaptive`` depends on the ids in its miniature tables. An error is the hit rate of the sample
minus that of all ids: ``rms`` and ``worst`` are over all draws, and ``told`` is the mean of the
errors that the samples report (two standard errors).
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.ids import hashed, power_law
from benchmarks.quality_data import read_ratings
from torchrec_hkv.replay import Log, Policy, Replayed, TableSettings, open_log, replay
from torchrec_hkv.replay.arrays import ArrayLog

SPEED_KEYS = ("format", "lookups", "sample", "policies", "rows", "batch", "threads")
ERROR_KEYS = ("stream", "lookups", "sample", "policy", "rows", "batch", "draws")
#: Number of parts of a stream, in each of which the ids stay the same.
_PHASES = 10


def fixed(power: float) -> Callable[[int, int], Tensor]:
    """Creates ids with a power law, one distinct id per five lookups."""

    def draw(lookups: int, seed: int) -> Tensor:
        generator_seed(seed)
        return hashed(power_law(lookups, lookups // 5, power, torch.device("cpu")))

    return draw


def drifting(power: float) -> Callable[[int, int], Tensor]:
    """Like :func:`fixed`, but each position of the law gets a new id once, at different times."""

    def draw(lookups: int, seed: int) -> Tensor:
        generator_seed(seed)
        positions, parts = lookups // 5, []
        for phase in range(_PHASES):
            at = power_law(lookups // _PHASES, positions, power, torch.device("cpu"))
            changed = (at * 2654435761 % 1_000_003 + phase) // _PHASES
            parts.append(hashed(at + positions * changed))
        return torch.cat(parts)

    return draw


def returning(lookups: int, seed: int) -> Tensor:
    """Creates ids that occur four times in quick succession and never again, as in sessions, mixed
    with a power law."""
    generator_seed(seed)
    count = lookups // 2
    begins = torch.arange(count // 4).repeat_interleave(4)
    delays = torch.rand(count).pow(4) * count / 4
    order = torch.argsort(begins * 4 + delays.long())
    sessions = begins[:count][order] + (1 << 40)
    ids = torch.empty(lookups, dtype=torch.int64)
    law = power_law(lookups - len(sessions), lookups // 10, 0.9, torch.device("cpu"))
    ids[: 2 * len(sessions) : 2] = sessions
    rest = torch.ones(lookups, dtype=torch.bool)
    rest[: 2 * len(sessions) : 2] = False
    ids[rest] = law
    return hashed(ids)


def generator_seed(seed: int) -> None:
    """Seeds torch."""
    torch.manual_seed(seed)


#: Streams by name.
STREAMS: dict[str, Callable[[int, int], Tensor]] = {
    "drifting 0.9": drifting(0.9),
    "power 0.8": fixed(0.8),
    "power 1.1": fixed(1.1),
    "sessions": returning,
}


def settings(args: argparse.Namespace, columns: tuple[str, ...]) -> dict[str, TableSettings]:
    """Returns the settings of one table."""
    policies = tuple(map(Policy, args.policies))
    return {"ids": TableSettings(columns, tuple(args.rows), policies)}


def run(args: argparse.Namespace, log: Log, sample: float) -> tuple[Replayed, float]:
    """Replays a log, and times it."""
    begin = time.perf_counter()
    replayed = replay(
        log,
        settings(args, log.columns[:1]),
        sample=sample,
        batch_size=args.batch,
        threads=args.threads,
    )["ids"]
    return replayed, time.perf_counter() - begin


def write_log(ids: Callable[[], Tensor], name: str, kind: str, folder: Path) -> Path:
    """Writes ids in a format: npy, npy32 (int32), parquet or csv. Keeps an existing file."""
    path = folder / f"{name}_{kind}.{kind.removesuffix('32')}"
    if path.exists():
        return path
    values = ids().numpy()
    if kind == "npy":
        np.save(path, values)
    elif kind == "npy32":
        np.save(path, values.astype(np.int32))
    elif kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"ids": values}), path)
    else:
        with path.open("w") as file:
            file.write("ids\n")
            for part in np.array_split(values, max(1, len(values) >> 20)):
                file.write("\n".join(map(str, part.tolist())) + "\n")
    return path


def speed(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields one row per format and sample."""
    draw = functools.cache(lambda: next(iter(STREAMS.values()))(args.lookups, args.seed))
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.formats:
            name = f"log_{args.lookups}_{args.seed}"
            path = write_log(draw, name, kind, args.folder or Path(folder))
            for sample in args.samples:
                load = os.getloadavg()[0]
                times, cpu_times = [], []
                for _ in range(args.repetitions):
                    begin = time.process_time()
                    times.append(run(args, open_log([str(path)]), sample)[1])
                    cpu_times.append(time.process_time() - begin)
                yield {
                    "format": kind,
                    "lookups": args.lookups,
                    "sample": sample,
                    "policies": " ".join(args.policies),
                    "rows": " ".join(map(str, args.rows)),
                    "batch": args.batch,
                    "threads": args.threads,
                    "seconds": round(min(times), 3),
                    "cpu_seconds": round(min(cpu_times), 3),
                    "m_lookups_s": round(args.lookups / min(times) / 1e6, 2),
                    "system_load": round(load, 2),
                }


def streams(args: argparse.Namespace) -> Iterator[tuple[str, Tensor]]:
    """Yields name and ids of each stream."""
    for name in args.streams:
        yield name, STREAMS[name](args.lookups, args.seed)
    if args.data is not None:
        ratings = read_ratings(args.data)
        for name in ("user", "movie"):
            yield f"{args.data.stem}, {name}", ratings.ids[name]


def errors(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields one row per stream, sample, policy and number of rows."""
    for name, ids in streams(args):
        renamed = [hashed(hashed(ids) + draw).numpy() for draw in range(args.draws)]
        logs = [ArrayLog(name, {"ids": values}) for values in renamed]
        # Samples first, so that a sample with too few rows is refused early.
        samples = {sample: [run(args, log, sample) for log in logs] for sample in args.samples}
        fulls = [run(args, log, 1.0) for log in logs]
        full, full_seconds = fulls[0][0], statistics.median(time for _, time in fulls)
        for sample, drawn in samples.items():
            seconds = statistics.median(time for _, time in drawn)
            for at, curve in enumerate(full.curves):
                for size, expected in enumerate(curve.points):
                    points = [replayed.curves[at].points[size] for replayed, _ in drawn]
                    whole = [replayed.curves[at].points[size].hit_rate for replayed, _ in fulls]
                    found = [
                        point.hit_rate - rate for point, rate in zip(points, whole, strict=True)
                    ]
                    yield {
                        "stream": name,
                        "lookups": len(ids),
                        "distinct": full.distinct,
                        "sample": sample,
                        "policy": str(curve.policy),
                        "rows": expected.rows,
                        "batch": args.batch,
                        "draws": args.draws,
                        "hit_rate": round(expected.hit_rate, 5),
                        "rms": round(statistics.fmean(error**2 for error in found) ** 0.5, 5),
                        "worst": round(max(found, key=abs), 5),
                        "told": round(statistics.fmean(point.error for point in points), 5),
                        "full_seconds": round(full_seconds, 2),
                        "seconds": round(seconds, 2),
                    }


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", choices=["speed", "error"], default="speed")
    parser.add_argument("--lookups", type=AtLeast(1), default=60_000_000)
    parser.add_argument("--samples", type=float, nargs="+", default=[0.01])
    parser.add_argument(
        "--policies", nargs="+", default=["lru", "lfu", "adaptive"], help="eviction policies"
    )
    parser.add_argument("--rows", type=AtLeast(1), nargs="+", default=[200_000, 500_000, 2_000_000])
    parser.add_argument("--batch", type=AtLeast(1), default=8192)
    parser.add_argument("--threads", type=AtLeast(1), default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=AtLeast(1), default=8, help="of error: samples")
    parser.add_argument("--streams", nargs="*", choices=list(STREAMS), default=list(STREAMS))
    parser.add_argument("--data", type=Path, help="of error: a file of ratings, too")
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=["npy", "npy32", "parquet", "csv"],
        default=["npy", "npy32", "parquet", "csv"],
        help="of speed",
    )
    parser.add_argument(
        "--repetitions", type=AtLeast(1), default=3, help="of speed: the best counts"
    )
    parser.add_argument("--folder", type=Path, help="of speed: for logs, which are kept")
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    if args.what == "speed":
        report(speed(args), args.out, SPEED_KEYS)
    else:
        report(errors(args), args.out, ERROR_KEYS)


if __name__ == "__main__":
    main()
