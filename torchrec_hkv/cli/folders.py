"""Common arguments of the verbs that read folders."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torchrec_hkv.cli.sizes import parse_bytes

if TYPE_CHECKING:
    from torchrec_hkv.checkpoint.saved_checkpoint import SavedCheckpoint

#: Help text for a folder argument.
FOLDER = "a checkpoint, a DeltaWriter's folder or one of the folders in it, or a saved HashTable"


def add_table(parser: argparse.ArgumentParser) -> None:
    """Adds the argument ``--table``."""
    parser.add_argument("--table", help="full name or own name of one table (default: all)")


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Adds the argument ``--memory``."""
    parser.add_argument(
        "--memory", default="512MiB", help="memory limit for entries (default: 512MiB)"
    )


def memory(arguments: argparse.Namespace) -> int:
    """Value of ``--memory`` in bytes.

    Raises:
        ValueError: the value is not a size.
    """
    return parse_bytes("--memory", arguments.memory)


def open_folder(path: str) -> SavedCheckpoint:
    """Opens a folder.

    Raises:
        ValueError: the folder is not as in :data:`FOLDER`, or is damaged.
    """
    from torchrec_hkv.checkpoint.saved_checkpoint import SavedCheckpoint

    return SavedCheckpoint.open(path)
