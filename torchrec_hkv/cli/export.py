"""Exports ids and rows of a saved table to files for other programs.

torchrec-hkv export checkpoints/last --table user --into user.parquet
torchrec-hkv export checkpoints/last --table user --into user.safetensors --states
torchrec-hkv export checkpoints/last --table user --into user        (id.npy, row.npy)
"""

from __future__ import annotations

import argparse

from torchrec_hkv.cli.folders import FOLDER, add_memory, memory, open_folder
from torchrec_hkv.cli.result import CommandResult

HELP = "ids and rows of a saved table as Parquet, .safetensors or .npy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument("folder", help=FOLDER)
    parser.add_argument(
        "--table", help="full name or own name of the table (default: the only one)"
    )
    parser.add_argument(
        "--into",
        required=True,
        help="file to write, NAME.parquet or NAME.safetensors, or a folder for id.npy and row.npy",
    )
    parser.add_argument(
        "--states", action="store_true", help="also export optimizer states, scores and last steps"
    )
    add_memory(parser)


def run(arguments: argparse.Namespace) -> CommandResult:
    """Exports a table."""
    from torchrec_hkv.checkpoint.export_files import export_files

    batch_bytes = memory(arguments)
    table = open_folder(arguments.folder).hash_table(arguments.table)
    try:
        content = export_files(table, arguments.into, batch_bytes, with_states=arguments.states)
    except OSError as error:
        raise ValueError(f"Writing failed: {error}") from None
    return CommandResult(
        f"Wrote {content['ids']:,} ids and rows of {content['dim']} values of table "
        f"{content['table']!r} to {arguments.into}.",
        content,
    )
