"""Reads all files of a checkpoint and reports damaged ones.

torchrec-hkv verify checkpoints/last

Exits with 1 if a file is damaged, cut short or missing.
"""

from __future__ import annotations

import argparse

from torchrec_hkv.cli.folders import FOLDER, add_memory, memory, open_folder
from torchrec_hkv.cli.result import CommandResult

HELP = "whether all files of a checkpoint, a chain or a saved hash table are whole"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument("folder", help=FOLDER)
    add_memory(parser)


def run(arguments: argparse.Namespace) -> CommandResult:
    """Verifies a folder."""
    from torchrec_hkv.backends.save_types import FileOptions
    from torchrec_hkv.checkpoint.verification import verify

    options = FileOptions(memory(arguments), threads=4)
    saved = open_folder(arguments.folder)
    damage = verify(saved, options)
    content = {"folder": str(saved.path), "whole": not damage, "damage": damage}
    text = "\n".join(damage) if damage else f"{saved.path} is whole."
    return CommandResult(text, content, 1 if damage else 0)
