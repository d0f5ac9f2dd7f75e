"""Times lookups and backwards on the device that is here, for the planner.

    torchrec-hkv calibrate
    torchrec-hkv calibrate --device cpu --threads 8 --out constants.json
    torchrun --nproc_per_node 2 -m torchrec_hkv.cli calibrate

Tables of each backend and of TorchRec's fused kernel are timed, in about a minute; they take up to
16 GiB of a GPU, 2 GiB of a host. Nothing else should run on the device. Planners read the file in
its default place: what TORCHREC_HKV_CALIBRATION names, else ~/.cache/torchrec_hkv/. Their argument
`calibration` names another. Under torchrun rank 0 does this, and the exchange between the ranks is
timed, too.
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

from torchrec_hkv.cli.answer import Answer
from torchrec_hkv.cli.sizes import parse_count
from torchrec_hkv.planner.calibration import VARIABLE, Calibration, default_path, is_leader

HELP = "measures this device for the planner"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured, and where it is written."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="(default: cuda where there is a GPU)"
    )
    parser.add_argument("--threads", metavar="N", help="of a CPU (default: torch's)")
    parser.add_argument(
        "--kernel",
        action="append",
        metavar="NAME",
        help="a backend, or fused; may be repeated (default: all)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="(default: where planners look)")


def check_writable(path: Path) -> None:
    """Refuses a file that could not be written after all has been measured.

    Raises:
        ValueError: it is a folder, or its own can't be made or written to.
    """
    if path.is_dir():
        raise ValueError(f"--out is {path}, but that is a folder.")
    there = next(p for p in path.absolute().parents if p.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ValueError(
            f"--out is {path}, but {there} can't be written to: {error.strerror}."
        ) from None


def run(arguments: argparse.Namespace) -> Answer:
    """Measures and writes.

    Raises:
        ValueError: bad input.
    """
    device_type = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is 'cuda', but torch sees no GPU.")
    if arguments.threads is not None:
        torch.set_num_threads(parse_count("--threads", arguments.threads))
    path = arguments.out or default_path(device_type)
    if path is None:
        raise ValueError(f"--out is missing, and {VARIABLE} is empty: one of them must say where.")
    check_writable(path)
    has_ranks = "RANK" in os.environ and not dist.is_initialized()
    index = None
    if device_type == "cuda":
        index = int(os.environ["LOCAL_RANK"]) if has_ranks else torch.cuda.current_device()
        torch.cuda.set_device(index)
    if has_ranks:
        backend = "nccl" if device_type == "cuda" else "gloo"
        # Rank 0 is busy for minutes before the others are needed.
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
        # Sharded modules in reference cycles hold the process group, whose threads must not see the
        # interpreter's end.
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
    return Answer(text, content)
