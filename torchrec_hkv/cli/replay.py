"""Finds the hit rates of numbers of rows and eviction policies, from a log of ids.

    torchrec-hkv replay clicks.parquet --table user --table item=item_id,last_item \\
        --rows 100k,300k,1M --eviction lru,lfu --target 0.9
    zcat ids.gz | torchrec-hkv replay - --rows 10M --sample 1% --plot curve.svg --out replay.json

Replays the log in real hash tables on the CPU, one for each policy and number of rows, with one
call for each step. --sample replays all lookups of a share of the ids, in proportionally smaller
tables. LOG is one file, or several in order of time, in Parquet, CSV, .npy, .npz or Criteo's
format, or - for the standard input. torchrec_hkv.replay.ReplayedLog reads the file of --out:
frequencies for the planner, curves, and rows of the tables under a budget. Exit code 1: a target
can't be reached.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from torchrec_hkv.cli.replay_arguments import (
    DTYPES,
    OPTIMIZERS,
    parse_policies,
    parse_rows,
    parse_share,
    parse_tables,
    settings,
)
from torchrec_hkv.cli.replay_plot import check_plot, write_plot
from torchrec_hkv.cli.result import CommandResult
from torchrec_hkv.cli.sizes import parse_bytes, parse_count
from torchrec_hkv.planner.report import columns, format_bytes
from torchrec_hkv.replay import (
    FORMATS,
    Capacity,
    Curve,
    Replayed,
    ReplayedLog,
    open_log,
    replay,
)

HELP = "finds hit rates by rows and policy from a log of ids"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    add = parser.add_argument
    add("log", nargs="+", metavar="LOG", help="files in order of time, or -")
    add("--format", choices=FORMATS, help="format of the log (default: by the file's name)")
    add("--separator", metavar="TEXT", help="separator of fields (default: from the first line)")
    add(
        "--header",
        action=argparse.BooleanOptionalAction,
        help="whether the first line of text has the columns' names (default: if no field of it is "
        "a number)",
    )
    add(
        "--table",
        action="append",
        metavar="NAME[=COLUMN,...]",
        help="a table, and the columns that look it up; may be repeated (default: each column)",
    )
    add(
        "--sort-by",
        metavar="COLUMN",
        help="column with times, for a log that is not in order of time and fits in memory",
    )
    add("--missing", metavar="ID", type=int, help="the value that marks a missing id")
    add(
        "--rows",
        required=True,
        metavar="N,...",
        help="rows to try: 100k,1M, or shares of the distinct ids: 10%%,25%% (reads the log twice)",
    )
    add(
        "--eviction",
        metavar="NAME,...",
        help="policies to try, by the names of HKVOptions, or aged_lfu:C (default: all names)",
    )
    add(
        "--admission",
        default="none",
        metavar="RULE,...",
        help="admission rules to try: none, frequency:COUNT[:ENTRIES or :SKETCH], probability:P "
        "(default: none)",
    )
    add("--expire-after", metavar="STEPS", help="remove ids after this many steps without a lookup")
    add("--epoch", metavar="SAMPLES", help="samples in an epoch, for epoch_lru and epoch_lfu")
    add(
        "--batch-size",
        default="8192",
        metavar="N",
        help="samples in a step, over all ranks (default: %(default)s)",
    )
    add(
        "--sample",
        default="1",
        metavar="SHARE",
        help="share of the ids to replay: 1%% or 0.01 (default: all)",
    )
    add("--target", metavar="RATE", help="hit rate to reach, such as 0.9")
    add("--budget", metavar="SIZE", help="bytes to divide among the tables so that the fewest miss")
    add(
        "--dim",
        action="append",
        metavar="[NAME=]N",
        help="columns of a row, for bytes (default: 64)",
    )
    add(
        "--optimizer",
        choices=list(OPTIMIZERS),
        default="rowwise_adagrad",
        help="optimizer, for bytes (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=list(DTYPES),
        default="fp32",
        help="data type of rows, for bytes (default: %(default)s)",
    )
    add("--threads", metavar="N", help="number of threads (default: torch's)")
    add("--plot", type=Path, metavar="FILE", help="draw the curves: .svg, .png or .pdf")
    add("--out", type=Path, metavar="FILE", help="write the results as JSON, for the planner")


def run(arguments: argparse.Namespace) -> CommandResult:
    """Replays the log.

    Raises:
        ValueError: an argument is invalid.
    """
    rows = parse_rows(arguments.rows)
    policies = parse_policies(arguments)
    target = None if arguments.target is None else parse_share("--target", arguments.target)
    budget = None if arguments.budget is None else parse_bytes("--budget", arguments.budget)
    options: dict[str, Any] = {
        "sample": parse_share("--sample", arguments.sample),
        "batch_size": parse_count("--batch-size", arguments.batch_size),
        "threads": None
        if arguments.threads is None
        else parse_count("--threads", arguments.threads),
    }
    if arguments.plot is not None:
        check_plot(arguments.plot)
    _check_out(arguments.out)
    log = open_log(
        arguments.log,
        arguments.format,
        separator=arguments.separator,
        header=arguments.header,
        sort_by=arguments.sort_by,
        missing=arguments.missing,
    )
    tables = parse_tables(arguments.table, log)
    shown = _Progress(sys.stderr.isatty() and not arguments.json)
    counts = dict.fromkeys(tables, 0)
    if any(one.share for one in rows):
        if not log.is_repeatable:
            raise ValueError(
                f"--rows is {arguments.rows!r}, but shares need to read the log twice, and the "
                "standard input can be read once: name numbers of rows."
            )
        first = settings(arguments, tables, dict.fromkeys(tables, ()), ())
        counted = replay(log, first, **options, progress=shown)
        counts = {name: table.distinct for name, table in counted.items()}
    tried = {name: tuple(sorted({r.of(counts[name]) for r in rows})) for name in tables}
    begin = time.perf_counter()
    replayed = replay(log, settings(arguments, tables, tried, policies), **options, progress=shown)
    seconds = time.perf_counter() - begin
    shown.close()
    replayed_log = ReplayedLog(options["batch_size"], options["sample"], replayed)
    capacities = None if budget is None else replayed_log.capacities(budget)
    answers = _Answers(target, capacities)
    if arguments.out is not None:
        replayed_log.write(arguments.out)
    if arguments.plot is not None:
        write_plot(arguments.plot, replayed, target)
    target_met = target is None or all(table.meeting(target) for table in replayed.values())
    text = _text(log.name, replayed_log, answers, seconds)
    return CommandResult(text, _content(replayed_log, answers), 0 if target_met else 1)


@dataclasses.dataclass(frozen=True)
class _Answers:
    """The requested hit rate, and the rows under the requested budget."""

    target: float | None
    capacities: dict[str, Capacity] | None


def _check_out(path: Path | None) -> None:
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"--out is {path}, but must be a file in a folder that exists.")


class _Progress:
    """A line on a terminal with the number of samples so far."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._began = time.perf_counter()

    def __call__(self, samples: int) -> None:
        if self._is_shown:
            rate = samples / max(time.perf_counter() - self._began, 1e-9) / 1e6
            print(f"\r{samples:,} samples, {rate:.1f} M/s", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._is_shown:
            print(file=sys.stderr)


def _content(log: ReplayedLog, answers: _Answers) -> dict[str, Any]:
    """The content to write, with values derived from it."""
    content = log.content()
    for name, fields in content["tables"].items():
        table = log.tables[name]
        best = table.best
        fields["best"] = {"policy": str(best.policy), "knee_rows": best.knee.rows}
        if answers.target is not None:
            fields["meeting_target"] = [
                {"rows": rows, "options": curve.policy.code(rows)}
                for curve, rows in table.meeting(answers.target)
            ]
        if answers.capacities is not None:
            capacity = answers.capacities[name]
            fields["under_budget"] = {
                "rows": capacity.rows,
                "bytes": capacity.bytes,
                "hit_rate": capacity.hit_rate,
                "options": capacity.policy.code(capacity.rows),
            }
    return content


def _text(name: str, log: ReplayedLog, answers: _Answers, seconds: float) -> str:
    lookups = sum(table.lookups for table in log.tables.values())
    ids = "all ids" if log.sample == 1 else f"a sample of {log.sample:.3g} of the ids"
    lines = [
        f"{name}: {lookups:,} lookups in {seconds:.1f} s ({lookups / seconds / 1e6:.1f} M/s), "
        f"steps of {log.batch_size:,} samples, {ids}"
    ]
    for table in log.tables.values():
        lines += ["", *_table_lines(table, log.sample < 1, answers.target)]
    if answers.capacities is not None:
        lines += ["", "Rows of each table that miss the fewest lookups within the budget:"]
        cells = [["table", "rows", "hit rate", "bytes", "options"]]
        for table, capacity in answers.capacities.items():
            figures = [f"{capacity.rows:,}", f"{capacity.hit_rate:.2%}"]
            figures += [format_bytes(capacity.bytes), capacity.policy.code(capacity.rows)]
            cells.append([table, *figures])
        lines.append(columns(cells))
    return "\n".join(lines)


def _table_lines(table: Replayed, is_sampled: bool, target: float | None) -> list[str]:
    about = "about " if is_sampled else ""
    lines = [
        f"{table.name}: {table.lookups:,} lookups of {about}{table.distinct:,} different ids; "
        f"with a row for each, {table.unlimited_hit_rate:.2%} hit"
    ]
    header = ["policy", "rows", "hit rate"]
    header += ["+-"] if is_sampled else []
    header += ["evicted", "return", "not admitted", "no place", "bytes"]
    cells = [header]
    for curve in table.curves:
        for point in curve.points:
            cell = [str(curve.policy), f"{point.rows:,}", f"{point.hit_rate:.2%}"]
            cell += [f"{point.error:.2%}"] if is_sampled else []
            cell += [f"{point.evicted:,}", f"{point.returned:,}", f"{point.unadmitted:,}"]
            cells.append([*cell, f"{point.refused:,}", format_bytes(point.bytes)])
    lines.append(columns(cells))
    best = table.best
    lines.append(
        f"Highest hit rates: {best.policy}; its knee is at {best.knee.rows:,} rows "
        f"({best.knee.hit_rate:.2%})."
    )
    if target is None:
        return [*lines, _advice(best, best.knee.rows)]
    best_choice = table.meeting(target)
    if not best_choice:
        reason = (
            f"with a row for each id {table.unlimited_hit_rate:.2%} hit"
            if table.unlimited_hit_rate < target
            else "try more rows"
        )
        return [*lines, f"Nothing that was tried reaches {target:.2%}: {reason}."]
    for curve, rows in best_choice:
        about = "at most" if rows == curve.points[0].rows else "about"
        lines.append(f"{target:.2%} need {about} {rows:,} rows with {curve.policy}.")
    return [*lines, _advice(*best_choice[0])]


def _advice(curve: Curve, rows: int) -> str:
    return f"num_embeddings={rows}, options={curve.policy.code(rows)}"
