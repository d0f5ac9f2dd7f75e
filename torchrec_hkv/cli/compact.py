"""Merges a base and its deltas into a whole checkpoint.

torchrec-hkv compact deltas                          becomes the new base of the chain
torchrec-hkv compact deltas --into checkpoints/last
"""

from __future__ import annotations

import argparse

from torchrec_hkv.cli.folders import add_memory, memory
from torchrec_hkv.cli.result import CommandResult

HELP = "merges a chain of deltas into a whole checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument("folder", help="a DeltaWriter's folder, or the last delta to merge in it")
    parser.add_argument(
        "--into",
        metavar="FOLDER",
        help="folder of the new checkpoint, which may exist (default: the chain gets a new base)",
    )
    add_memory(parser)


def run(arguments: argparse.Namespace) -> CommandResult:
    """Merges a chain."""
    from torchrec_hkv.checkpoint import compact

    try:
        path = compact(arguments.folder, arguments.into, batch_bytes=memory(arguments))
    except OSError as error:
        raise ValueError(f"Writing failed: {error}") from None
    return CommandResult(f"Wrote {path}.", {"folder": arguments.folder, "checkpoint": str(path)})
