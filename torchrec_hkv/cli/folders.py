"""Arguments of the verbs that look into folders."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torchrec_hkv.cli.sizes import parse_bytes

if TYPE_CHECKING:
    from torchrec_hkv.checkpoint.opened import Saved

#: What a folder may be.
FOLDER = "a checkpoint, a DeltaWriter's folder or one of the folders in it, or a saved HashTable"


def add_table(parser: argparse.ArgumentParser) -> None:
    """The table that a verb looks at."""
    parser.add_argument("--table", help="this table alone: its full name, or its own")


def add_memory(parser: argparse.ArgumentParser) -> None:
    """The memory that a verb may take."""
    parser.add_argument(
        "--memory", default="512MiB", help="memory it may take for entries (default: 512MiB)"
    )


def memory(arguments: argparse.Namespace) -> int:
    """Bytes of :func:`add_memory`.

    Raises:
        ValueError: it is no size.
    """
    return parse_bytes("--memory", arguments.memory)


def open_folder(path: str) -> Saved:
    """What a folder holds.

    Raises:
        ValueError: it is none of those that :data:`FOLDER` says, or is damaged.
    """
    from torchrec_hkv.checkpoint.opened import Saved

    return Saved.open(path)
