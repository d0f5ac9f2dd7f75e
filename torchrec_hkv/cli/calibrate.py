"""Times lookups and backwards on the device that is here, for the planner.

    torchrec-hkv calibrate
    torchrec-hkv calibrate --device cpu --threads 8 --out constants.json

Tables of each backend and of TorchRec's fused kernel are timed, in about a minute; they take up to
16 GiB of a GPU, 2 GiB of a host. Nothing else should run on the device. Planners read the file in
its default place: what TORCHREC_HKV_CALIBRATION names, else ~/.cache/torchrec_hkv/. Their argument
`calibration` names another.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from torchrec_hkv.cli.answer import Answer
from torchrec_hkv.cli.sizes import parse_count
from torchrec_hkv.planner.calibration import VARIABLE, Calibration, default_path

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
    index = torch.cuda.current_device() if device_type == "cuda" else None
    measured = Calibration.measured(
        torch.device(device_type, index),
        arguments.kernel,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    measured.save(path)
    content = {
        "file": str(path),
        "device": measured.device,
        "threads": measured.threads,
        "kernels": sorted(measured.constants),
    }
    text = f"{measured.device}: {', '.join(content['kernels'])} measured, written to {path}."
    return Answer(text, content)
