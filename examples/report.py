"""What the example shows: a live progress line, a table at the end, a JSON file."""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from tqdm import tqdm

from torchrec_hkv._version import __version__

if TYPE_CHECKING:
    from click_data import ClickLog
    from click_training import Result, Settings

PACKAGES = ["torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "torch"]


class Progress:
    """One line for one run: redrawn on a terminal, printed once at the end elsewhere."""

    def __init__(self, title: str, steps: int, batch_size: int, shown: bool) -> None:
        self.title = title
        self.steps = steps
        self.batch_size = batch_size
        self.shown = shown
        self.live = shown and sys.stderr.isatty()
        self.counters: dict[str, int] = {}
        self.line = ""

    def __enter__(self) -> Progress:
        self.started = time.perf_counter()
        self.bar = tqdm(
            total=self.steps,
            disable=not self.live,
            bar_format="{desc}: {percentage:3.0f}%{postfix}",
            desc=self.title,
            dynamic_ncols=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.shown and not self.live and self.line:
            print(f"{self.title}: {self.line}", flush=True)

    def update(self, step: int, loss: float, auc: float, counters: dict[str, int]) -> None:
        """Counters are totals since the start of the run; the line shows rates since the last."""
        speed = step * self.batch_size / (time.perf_counter() - self.started)
        parts = [f"{speed:,.0f} samples/s", f"loss {loss:.4f}", f"AUC {auc:.4f}"]
        if counters:
            lookups = counters["lookups"] - self.counters.get("lookups", 0)
            hits = counters["hits"] - self.counters.get("hits", 0)
            parts += [
                f"hit rate {hits / max(1, lookups):.1%}",
                f"load factor {counters['size'] / counters['capacity']:.2f}",
                f"evictions {counters['evicted']:,}",
            ]
        self.counters = counters
        self.line = ", ".join(parts)
        self.bar.set_postfix_str(self.line, refresh=False)
        self.bar.update(step - self.bar.n)


COLUMNS = ["run", "rows", "test AUC", "hit rate", "load", "evictions"]


def cells(result: Result) -> list[str]:
    counters = result.counters
    row = [
        result.variant.title,
        f"{sum(result.rows.values()):,}",
        f"{result.auc:.4f}",
    ]
    if not counters:
        return [*row, "", "", ""]
    return [
        *row,
        f"{counters['hits'] / max(1, counters['lookups']):.1%}",
        f"{counters['size'] / counters['capacity']:.2f}",
        f"{counters['evicted']:,}",
    ]


def print_table(title: str, results: list[Result]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        # A GPU machine without a package registry may lack rich.
        print(title)
        for row in [COLUMNS, *map(cells, results)]:
            print(f"{row[0]:26}" + "".join(f"{cell:>10}" for cell in row[1:]))
        return
    table = Table(title=title)
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for result in results:
        table.add_row(*cells(result))
    Console().print(table)


def print_comparison(results: list[Result]) -> None:
    """The claim of the example: a hash table with room for all ids trains as a stock table does."""
    auc = {result.variant.key: result.auc for result in results}
    if {"stock", "hkv"} <= set(auc):
        print(f"hkv with room for every id - stock: {auc['hkv'] - auc['stock']:+.6f} AUC")


def write_json(
    path: Path, log: ClickLog, split: int, settings: Settings, results: list[Result]
) -> None:
    content = {
        "data": log.name,
        "train_rows": split,
        "test_rows": len(log) - split,
        "seed": settings.seed,
        "epochs": settings.epochs,
        "batch_size": settings.batch_size,
        "device": settings.device.type,
        "device_name": device_name(settings.device),
        "world_size": dist.get_world_size(),
        "versions": versions(),
        "runs": {
            result.variant.key: {
                "title": result.variant.title,
                "test_auc": result.auc,
                "train_loss": result.loss,
                "samples_per_second": result.samples_per_second,
                "rows": result.rows,
                "counters": result.counters,
            }
            for result in results
        },
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torchrec-hkv": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
