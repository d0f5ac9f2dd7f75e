"""Quality of tables with fewer rows than ids: one pass over a stream of clicks, in order of time.

    python -m benchmarks quality --data movietweetings.dat --data recbole-1.2.1-py3-none-any.whl \\
        --out benchmarks/results/quality.csv --plot docs/performance/quality.svg

Streams are MovieTweetings and MovieLens-100K by --data, and two synthetic streams: `turnover`, in
which a fifth of the ids is replaced in each tenth of the time, and `all replaced`. The number of
rows of a table is a share of its feature's distinct ids. The benchmark compares the policies of
`hkv`, TorchRec's MCH (with an eviction in every step), static tables of as many rows with ids
modulo the rows, and a row per id. TorchRec's HashZch is not included, because it takes new ids
on GPUs only.

The model is a DLRM (16 columns, dense 32-16, over 64-32-1; row-wise Adagrad for the rows, Adam for
the rest), which predicts each batch of 256 and is then trained on it. Reported are the AUC over the
last 80 % as a mean over seeds, and its difference to --baseline with a 95 % interval, paired and
bootstrapped by user.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch

from benchmarks.arguments import AtLeast
from benchmarks.environment import CsvFile
from benchmarks.quality_rows import DIM, methods, rows_of
from benchmarks.quality_streams import REPLACED, TURNOVER, Stream, read, synthetic_stream
from torchrec_hkv import HKVOptions

BATCH = 256
_DENSE_RATE = 1e-3
_FIRST_SHARE = 0.2
SYNTHETIC_STREAMS = {how.name: how for how in (TURNOVER, REPLACED)}


class Model(nn.Module):
    """A DLRM over tables of any kind."""

    def __init__(self, dense: int, features: int) -> None:
        super().__init__()
        self.dense = DenseArch(dense, [32, DIM])
        self.interaction = InteractionArch(features)
        pairs = (features + 1) * features // 2
        self.over = OverArch(DIM + pairs, [64, 32, 1])

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        return self.over(self.interaction(self.dense(dense), rows)).squeeze(1)


def predicted(stream: Stream, method: str, share: float, seed: int) -> tuple[Tensor, float]:
    """Returns logits of all rows, each predicted before training on it, and the hit rate.

    Args:
        stream: rows in order of time.
        method: one of :func:`benchmarks.quality_rows.methods`.
        share: rows of a table, as a share of its feature's distinct ids.
        seed: seed of the model and its tables.
    """
    torch.manual_seed(seed)
    model = Model(stream.dense.shape[1], len(stream.ids))
    counts = {name: max(1, int(share * ids.unique().numel())) for name, ids in stream.ids.items()}
    tables = rows_of(method, counts, stream.ids, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=_DENSE_RATE)
    logits = []
    for begin in range(0, len(stream), BATCH):
        part = slice(begin, begin + BATCH)
        rows = tables({name: ids[part] for name, ids in stream.ids.items()})
        out = model(stream.dense[part], rows)
        logits.append(out.detach())
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(out, stream.labels[part]).backward()
        optimizer.step()
    return torch.cat(logits), tables.hit_rate()


class Bootstrap:
    """Computes AUCs under resamples of users, which are the same for all methods.

    Args:
        users: int64 ``[n]``, the user of each row.
        labels: ``[n]``, 0 or 1.
        resamples: number of resamples.
    """

    def __init__(self, users: Tensor, labels: Tensor, resamples: int) -> None:
        _, of = users.unique(return_inverse=True)
        count = int(of.max()) + 1
        generator = torch.Generator().manual_seed(0)
        weights = [torch.ones(labels.numel(), dtype=torch.float64)]
        for _ in range(resamples):
            drawn = torch.randint(0, count, (count,), generator=generator)
            weights.append(torch.bincount(drawn, minlength=count).double()[of])
        self._weights, self._labels = torch.stack(weights), labels.double()

    def aucs(self, scores: Tensor) -> Tensor:
        """Returns the AUC of all rows, and the AUC of each resample. Equal scores count half.

        Args:
            scores: predictions, ``[n]``.
        """
        distinct, of = torch.unique(scores, return_inverse=True)
        aucs = []
        for weights in self._weights:
            clicks = torch.zeros(distinct.numel(), dtype=torch.float64)
            others = torch.zeros_like(clicks)
            clicks.index_add_(0, of, weights * self._labels)
            others.index_add_(0, of, weights * (1 - self._labels))
            below = others.cumsum(0) - others / 2
            aucs.append((clicks * below).sum() / (clicks.sum() * others.sum()))
        return torch.stack(aucs)


def compared(
    streams: Sequence[Stream],
    share: float,
    names: Sequence[str],
    baseline: str,
    resamples: int,
) -> Iterator[dict[str, object]]:
    """Yields the result of each method on a stream.

    Args:
        streams: one stream per seed; a stream of real data is the same for all seeds.
        share: rows divided by distinct ids.
        names: methods, including the baseline.
        baseline: the method that the others are compared with.
        resamples: number of resamples of users.
    """
    cut = int(_FIRST_SHARE * len(streams[0]))
    all_aucs: dict[str, Tensor] = {}
    figures: dict[str, tuple[float, float]] = {}
    drawn: dict[int, Bootstrap] = {}
    for name in [baseline, *(name for name in names if name != baseline)]:
        began, aucs, hits = time.perf_counter(), [], []
        for seed, stream in enumerate(streams):
            if id(stream) not in drawn:
                drawn[id(stream)] = Bootstrap(
                    stream.ids["user"][cut:], stream.labels[cut:], resamples
                )
            logits, hit_rate = predicted(stream, name, share, seed)
            aucs.append(drawn[id(stream)].aucs(logits[cut:]))
            hits.append(hit_rate)
        all_aucs[name] = torch.stack(aucs)
        figures[name] = sum(hits) / len(hits), (time.perf_counter() - began) / len(streams)
        print(f"{streams[0].name}, {share:g}, {name}: {figures[name][1]:.1f} s", file=sys.stderr)
    for name in names:
        aucs = all_aucs[name]
        difference = (aucs - all_aucs[baseline]).mean(0)
        bounds = torch.tensor([0.025, 0.975], dtype=torch.float64)
        low, high = difference[1:].quantile(bounds) if resamples else (torch.nan, torch.nan)
        spread = aucs[:, 0].std() if len(streams) > 1 else torch.nan
        yield {
            "stream": streams[0].name,
            "share": share,
            "method": name,
            "auc": round(float(aucs[:, 0].mean()), 4),
            "sd_over_seeds": round(float(spread), 4),
            "baseline": baseline,
            "difference": round(float(difference[0]), 4),
            "low_95": round(float(low), 4),
            "high_95": round(float(high), 4),
            "hit_rate": None if math.isnan(figures[name][0]) else round(figures[name][0], 4),
            "seeds": len(streams),
            "rows": len(streams[0]),
        }


def text_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Formats the AUC by method and column, with the difference to the baseline and its
    interval."""
    columns = list(dict.fromkeys((row["stream"], row["share"]) for row in rows))
    names = list(dict.fromkeys(row["method"] for row in rows))
    cells = [["method", *(f"{stream} {100 * share:g} %" for stream, share in columns)]]
    found = {(row["method"], row["stream"], row["share"]): row for row in rows}
    for name in names:
        line = [str(name)]
        for column in columns:
            row = found.get((name, *column))
            if row is None:
                line.append("")
            elif name == row["baseline"]:
                line.append(f"{row['auc']:.4f}")
            else:
                low, high = row["low_95"], row["high_95"]
                line.append(f"{row['auc']:.4f} {row['difference']:+.4f} ({low:+.4f} {high:+.4f})")
        cells.append(line)
    widths = [max(len(line[at]) for line in cells) for at in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def plot(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Plots differences to the baseline with their intervals, one panel per column.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys((row["stream"], row["share"]) for row in rows))
    names = list(dict.fromkeys(row["method"] for row in rows))[::-1]
    with rc_context({"svg.hashsalt": "quality"}):
        across = min(len(columns), 4)
        down = -(-len(columns) // across)
        size = (2.6 * across + 1, down * (0.28 * len(names) + 0.7) + 0.3)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(down, across, sharey=True, squeeze=False).flatten()
        for axes in grid[len(columns) :]:
            axes.set_visible(False)
        for axes, (stream, share) in zip(grid, columns, strict=False):
            part = {r["method"]: r for r in rows if (r["stream"], r["share"]) == (stream, share)}
            for at, name in enumerate(names):
                if name not in part:
                    continue
                row = part[name]
                middle = float(row["difference"])
                low, high = float(row["low_95"]), float(row["high_95"])
                errors = [[max(middle - low, 0)], [max(high - middle, 0)]]
                axes.errorbar(middle, at, xerr=errors, fmt="o", ms=4, capsize=2, color="C0")
            axes.axvline(0, color="black", linewidth=0.8)
            axes.set_title(f"{stream}, {100 * float(share):g} %", fontsize=8)
            axes.set_yticks(range(len(names)), names, fontsize=8)
            axes.tick_params(axis="x", labelsize=7)
            axes.grid(alpha=0.3)
        figure.supxlabel(f"AUC less that of {rows[0]['baseline']}, 95 % by user", fontsize=8)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = methods()
    default = f"hkv, {HKVOptions().eviction}"
    add = parser.add_argument
    add("--data", type=Path, action="append", default=[], help="a file; may be repeated")
    add(
        "--made",
        nargs="*",
        choices=list(SYNTHETIC_STREAMS),
        default=list(SYNTHETIC_STREAMS),
        help="(default: both)",
    )
    add("--shares", type=float, nargs="+", default=[0.25, 0.1], help="(default: 0.25 0.1)")
    add("--methods", nargs="+", choices=known, default=known, metavar="NAME")
    add("--baseline", choices=known, default=default, help="(default: %(default)s)")
    add("--seeds", type=AtLeast(1), default=5, help="(default: 5)")
    add("--limit", type=AtLeast(1), default=None, help="earliest rows to keep")
    add("--resamples", type=AtLeast(1), default=200, help="of users (default: 200)")
    add("--threads", type=AtLeast(1), default=1)
    add("--out", type=Path, default=None, help="CSV file; keeps rows of other runs")
    add("--plot", type=Path, default=None, help="SVG or PNG; takes matplotlib")
    args = parser.parse_args(arguments)
    for share in args.shares:
        if not 0 < share <= 1:
            parser.error(f"--shares has {share}, but must be above 0 and at most 1")
    torch.set_num_threads(args.threads)
    names = list(dict.fromkeys([args.baseline, *args.methods]))
    names.sort(key=known.index)
    sources: list[list[Stream]] = []
    for path in args.data:
        try:
            stream = read(path).first(args.limit)
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"--data {path} can't be read: {error}")
        sources.append([stream] * args.seeds)
    for name in args.made:
        sources.append(
            [
                synthetic_stream(SYNTHETIC_STREAMS[name], seed).first(args.limit)
                for seed in range(args.seeds)
            ]
        )
    rows: list[dict[str, object]] = []
    with CsvFile(args.out, ["stream", "share", "method", "baseline"]) as file:
        for streams, share in itertools.product(sources, args.shares):
            for row in compared(streams, share, names, args.baseline, args.resamples):
                rows.append(row)
                file.write(row)
    print(text_table(rows))
    if args.plot is not None:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
