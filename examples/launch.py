"""Common parts of all examples: arguments, processes, and errors as one sentence."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from click_data import ClickLog, DataError, read

from torchrec_hkv.metrics.tensorboard import summary_writer_class

ROOT = Path(__file__).resolve().parent.parent
MOVIELENS = ROOT / ".data" / "recbole-1.2.1-py3-none-any.whl"


def positive(text: str) -> int:
    """Parses an argument that is a whole number above 0."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    if number > 1 << 62:
        raise argparse.ArgumentTypeError(f"'{text}' is more than 2^62")
    return number


def share(text: str) -> float:
    """Parses an argument between 0 and 1."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0, at most 1")
    return number


def share_or_zero(text: str) -> float:
    """Parses an argument from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 to 1")
    return number


def whole_number(text: str) -> int:
    """Parses an argument that is a whole number from 0 to 2^62, such as a seed."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= 1 << 62:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0 to 2^62")
    return number


class Parser(argparse.ArgumentParser):
    """Raises DataError for bad arguments; :func:`run` prints it once."""

    def error(self, message: str) -> NoReturn:
        sentence = message if message.endswith(".") else f"{message}."
        raise DataError(f"{sentence[:1].upper()}{sentence[1:]}")


def make_parser(description: str, data: Path | None = None) -> Parser:
    """Creates a parser with the arguments of all examples.

    Args:
        description: the example's docstring.
        data: the default file; None if the user must give one.
    """
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data",
        type=Path,
        default=data,
        required=data is None,
        metavar="FILE",
        help="MovieLens-100K (.inter, or the recbole wheel), MovieTweetings (.dat), or Criteo"
        " (.npz, or the published text files: .txt, .tsv, .gz or without suffix, as day_0)"
        + (" (default: the wheel that 'make demo' downloads)" if data else ""),
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=256,
        help="rows a step, over all processes (default: %(default)s)",
    )
    parser.add_argument("--limit", type=positive, help="use only this many rows, the earliest")
    parser.add_argument("--seed", type=whole_number, default=0, help="(default: %(default)s)")
    add_device_and_outputs(parser)
    return parser


def add_device_and_outputs(parser: argparse.ArgumentParser) -> None:
    """Adds options for the device and the output files."""
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="(default here: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument(
        "--tensorboard", type=Path, metavar="FOLDER", help="write the metrics for TensorBoard"
    )


def check_device_and_outputs(arguments: argparse.Namespace) -> None:
    """Raises DataError if there are too few GPUs, or output files can't be written."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if arguments.device == "cuda" and here > gpus:
        raise DataError(f"As many GPUs as processes ({here}) are needed, and there are {gpus}.")
    if arguments.json:
        check_json(arguments.json)
    if arguments.tensorboard:
        check_tensorboard(arguments.tensorboard)


def load(arguments: argparse.Namespace, train_share: float = 1.0) -> ClickLog:
    """Reads the data, and checks the arguments that depend on it.

    Raises:
        DataError: the input is invalid.
    """
    check_device_and_outputs(arguments)
    if arguments.data == MOVIELENS and not MOVIELENS.is_file():
        raise DataError(f"There is no {MOVIELENS}: 'make demo' downloads it, or name --data FILE.")
    log = read(arguments.data, arguments.limit)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.batch_size % processes:
        raise DataError(f"The batch size must be a multiple of the {processes} processes.")
    if arguments.batch_size > int(len(log) * train_share):
        raise DataError(
            f"A batch of {arguments.batch_size} rows is more than the"
            f" {int(len(log) * train_share)} rows to train on."
        )
    return log


def check_json(path: Path, option: str = "--json") -> None:
    """Raises DataError if the file of an option can't be written."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise DataError(f"There is no folder {folder}.")
    if path.is_dir():
        raise DataError(f"{option} is {path}, but that is a folder.")
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise DataError(f"{path} can't be written: {error.strerror}.") from None
    if is_new:
        path.unlink(missing_ok=True)


def check_tensorboard(folder: Path) -> None:
    """Raises DataError if TensorBoard is not installed, or its folder is not writable."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise DataError(f"--tensorboard is {folder}, but {there} is no folder.")
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise DataError(
            f"--tensorboard is {folder}, but {there} can't be written to: {error.strerror}."
        ) from None
    try:
        summary_writer_class()
    except ImportError as error:
        raise DataError(str(error)) from None


def join_processes(device: str) -> torch.device:
    """Joins the process group of torchrun, or creates a group of one process."""
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return torch.device(device, torch.cuda.current_device() if device == "cuda" else None)


@contextlib.contextmanager
def processes(device: str) -> Iterator[torch.device]:
    """A context with a process group. At its end, all processes wait for each other."""
    joined = join_processes(device)
    yield joined
    dist.barrier()
    dist.destroy_process_group()


def count_processes() -> str:
    """Returns the number of processes as text: ``1 process`` or ``2 processes``."""
    count = dist.get_world_size()
    return f"{count} process" if count == 1 else f"{count} processes"


def silence_advice() -> None:
    """Hides warnings that are meant for developers of TorchRec and PyTorch."""
    warnings.simplefilter("ignore", FutureWarning)
    for name in ("torchrec", "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _tell_torchrun(sentence: str) -> None:
    """Writes a sentence to torchrun's summary of a failed process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": message}))


def run(example: Callable[[], int | None]) -> int:
    """Runs an example. Prints an error in its input as one sentence, once.

    Returns:
        The exit code: the example's, 0 if it returns None; 2 for bad input; 130 after Ctrl-C.
    """
    silence_advice()
    try:
        code = example()
        # Models in reference cycles hold their process group. If a thread of gloo still has to drop
        # a tensor when the interpreter ends, it aborts the process. So they are collected now.
        gc.collect()
    except DataError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
            _tell_torchrun(f"error: {error}")
        else:
            # All ranks fail in the same way. The first one that exits makes torchrun end the
            # others, so these wait until rank 0 has printed the error.
            time.sleep(5)
        return 2
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("error: Interrupted.", file=sys.stderr)
        return 130
    return code or 0
