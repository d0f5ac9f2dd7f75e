"""Benchmarks set up their ranks, and one rank reports."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import device_of_rank, joined_ranks, report_once


def reported(rank: int, _world_size: int, _device: torch.device, folder: Path) -> tuple[str, bool]:
    """What a rank prints for two rows, and whether it writes a file."""
    out = folder / f"{rank}.csv"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        report_once(({"row": row} for row in range(2)), out)
    return printed.getvalue(), out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("device_type", ["cpu"])
def test_rank_0_alone_reports(run_ranks, tmp_path):
    assert run_ranks(2, reported, tmp_path) == [("row 0\nrow 1\n", True), ("", False)]


def test_without_torchrun_a_rank_is_alone_until_the_end():
    seen = []

    def fail() -> None:
        with joined_ranks(device_of_rank("cpu"), minutes=1):
            seen.append((dist.get_rank(), dist.get_world_size(), dist.get_backend()))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [(0, 1, "gloo")]
    assert not dist.is_initialized()


@pytest.mark.parametrize("kind", [None, "cpu", "cuda", "cuda:0"])
def test_the_device_is_a_gpu_where_there_is_one(kind):
    if kind not in (None, "cpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    is_gpu = torch.cuda.is_available() and kind != "cpu"
    assert device_of_rank(kind) == torch.device("cuda:0" if is_gpu else "cpu")
