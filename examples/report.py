"""The results of an example: a printed table and a JSON file."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from torchrec_hkv._version import __version__

if TYPE_CHECKING:
    from click_data import ClickLog
    from click_evaluation import EvaluationResult
    from click_training import Result, Settings

PACKAGES = ["torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "torch"]


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
        # rich may be missing on a GPU machine without a package registry.
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


def print_judgements(judgements: Sequence[EvaluationResult]) -> None:
    """Prints a line per evaluation on the test."""
    for one in judgements:
        print(
            f"after {one.step:,} steps: test loss {one.loss:.4f},"
            f" normalized entropy {one.normalized_entropy:.4f}, AUC {one.auc:.4f}"
        )


def print_comparison(results: list[Result]) -> None:
    """Prints the difference in AUC between a hash table that holds all ids and a stock table."""
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
                "progress": [dataclasses.asdict(one) for one in result.progress],
                "evaluations": [dataclasses.asdict(one) for one in result.judgements],
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
