"""The benchmark of sharded steps runs, at sizes too small for meaningful figures."""

from __future__ import annotations

import argparse
import csv
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import sharded_step
from tests.support.benchmark_runs import run_benchmark

ROOT = Path(__file__).parents[2]
ARGUMENTS = ["--tables", "3", "--rows", "3000", "--dim", "8", "--batch", "32", "--device", "cpu"]
ARGUMENTS += ["--steps", "3", "--rounds", "2"]


def run(ranks: int, *more: str) -> subprocess.CompletedProcess[str]:
    return run_benchmark("sharded_step", *ARGUMENTS, *more, ranks=ranks)


@pytest.mark.slow
def test_a_row_for_the_step_and_one_for_the_exchange(tmp_path):
    out = tmp_path / "out.csv"
    done = run(2, "--out", str(out), "--profile", str(tmp_path / "profile"))
    assert done.returncode == 0, done.stderr
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["what"], row["stream"]) for row in rows] == [
        (what, stream) for stream in ("uniform", "power_law") for what in ("step", "input_dist")
    ]
    for row in rows:
        assert row["ranks"] == "2"
        stock, hkv = float(row["stock_ms"]), float(row["hkv_ms"])
        assert float(row["ratio"]) == pytest.approx(hkv / stock, rel=0.01)
        assert float(row["hkv_samples_s"]) == pytest.approx(2 * 32 * 1000 / hkv, rel=0.01)
        assert row["command"].startswith("torchrun --nproc_per_node 2 -m benchmarks.sharded_step")
    profiles = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert profiles == [
        f"{s}_{side}.txt" for s in ("power_law", "uniform") for side in ("hkv", "stock")
    ]


@pytest.mark.slow
def test_groups_and_wire_dtype_are_said(tmp_path):
    out = tmp_path / "out.csv"
    done = run(2, "--num-groups", "2", "--wire-dtype", "bf16", "--out", str(out))
    assert done.returncode == 0, done.stderr
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["num_groups"], row["wire_dtype"]) for row in rows} == {("2", "bf16")}


@pytest.mark.slow
def test_tables_too_full_to_hold_all_ids_are_refused():
    done = run(1, "--load", "1.5")
    assert done.returncode != 0
    assert "a table has no room for an id; --load must be lower." in done.stderr


def kinds_of_sides(_rank: int, _world_size: int, device: torch.device) -> dict[str, str]:
    args = argparse.Namespace(
        tables=2,
        rows=50,
        dim=8,
        batch=4,
        bag=2,
        load=0.8,
        num_groups=2,
        wire_dtype="fp32",
        device=device,
    )
    models = {side: sharded_step.make_model(args, side) for side in sharded_step.SIDES}
    return {side: type(model.module).__name__ for side, model in models.items()}


@pytest.mark.slow
@pytest.mark.parametrize("device_type", ["cpu"])
def test_sides_are_torchrecs_own_tables_and_ours(run_ranks):
    (kinds,) = run_ranks(1, kinds_of_sides)
    assert kinds == {
        "stock": "ShardedEmbeddingBagCollection",
        "hkv": "BackendEmbeddingBagCollection",
    }
