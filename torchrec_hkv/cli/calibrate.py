"""Times lookups and backwards on this machine's device, for the planner.

    torchrec-hkv calibrate
    torchrec-hkv calibrate --device cpu --threads 8 --out constants.json
    torchrun --nproc_per_node 2 -m torchrec_hkv.cli calibrate

Times tables of each backend and of TorchRec's fused kernel, in about a minute. They take up to 16
GiB of a GPU, or 2 GiB of host memory. Nothing else should run on the device. Planners read the file
in its default place: the path in TORCHREC_HKV_CALIBRATION, else ~/.cache/torchrec_hkv/. Their
argument `calibration` names another file. Under torchrun, rank 0 measures the tables, and the
exchange between the ranks is measured, too.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from torchrec_hkv.cli.result import CommandResult
from torchrec_hkv.cli.sizes import parse_count
from torchrec_hkv.planner.calibration import VARIABLE, Calibration, default_path, is_leader

HELP = "measures this device for the planner"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="device to measure (default: cuda if there is a GPU)",
    )
    parser.add_argument("--threads", metavar="N", help="threads of a CPU (default: torch's)")
    parser.add_argument(
        "--kernel",
        action="append",
        metavar="NAME",
        help="a backend, or fused; may be repeated (default: all)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write (default: where planners look)"
    )


def check_writable(path: Path) -> None:
    """Checks early that the result can be written.

    Raises:
        ValueError: the path is a folder, or its folder can't be created or written to.
    """
    if path.is_dir():
        raise ValueError(f"--out is {path}, but that is a folder: name a file.")
    there = next(p for p in path.absolute().parents if p.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ValueError(
            f"--out is {path}, but {there} can't be written to: {error.strerror}."
        ) from None


def run(arguments: argparse.Namespace) -> CommandResult:
    """Measures the device, and writes the constants.

    Raises:
        ValueError: an argument is invalid.
    """
    device_type = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is 'cuda', but torch sees no GPU.")
    if arguments.threads is not None:
        torch.set_num_threads(parse_count("--threads", arguments.threads))
    path = arguments.out or default_path(device_type)
    if path is None:
        raise ValueError(f"--out is missing and {VARIABLE} is empty: set one of them to a file.")
    check_writable(path)
    has_ranks = "RANK" in os.environ and not dist.is_initialized()
    index = None
    if device_type == "cuda":
        index = int(os.environ["LOCAL_RANK"]) if has_ranks else torch.cuda.current_device()
        torch.cuda.set_device(index)
    if has_ranks:
        backend = "nccl" if device_type == "cuda" else "gloo"
        # The other ranks wait for minutes while rank 0 measures.
        dist.init_process_group(backend, timeout=datetime.timedelta(hours=1))
    try:
        measured = Calibration.measured(
            torch.device(device_type, index),
            arguments.kernel,
            lambda line: is_leader() and print(line, file=sys.stderr, flush=True),
        )
        leads = is_leader()
        if leads:
            measured.save(path)
    finally:
        # Reference cycles of sharded modules keep the process group and its threads alive. The
        # threads must end before the interpreter does.
        gc.collect()
        if has_ranks:
            dist.destroy_process_group()
    content = {
        "file": str(path),
        "device": measured.device,
        "threads": measured.threads,
        "kernels": sorted(measured.constants),
        "exchange_bytes_per_ms": measured.exchange,
    }
    kernels = ", ".join(content["kernels"])
    text = f"{measured.device}: {kernels} measured, written to {path}." if leads else ""
    return CommandResult(text, content)
