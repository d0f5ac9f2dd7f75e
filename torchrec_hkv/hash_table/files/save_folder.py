"""The folder of a saved table: prepared before a save, cleaned after it."""

from __future__ import annotations

import os
from pathlib import Path

from torchrec_hkv.hash_table.files.file_names import MANIFEST, UNFINISHED, is_of_table
from torchrec_hkv.hash_table.files.manifest import Manifest


def prepare_folder(folder: Path) -> None:
    """Creates the folder of a saved table, or removes the files that killed saves left in it.

    Raises:
        ValueError: the path is not a folder of a saved table, or is a broken link.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, but a table is saved to a folder: name a folder.")
    if folder.is_symlink() and not folder.exists():
        raise ValueError(
            f"{folder} is a link to {os.readlink(folder)!r}, which does not exist: create that "
            "folder, or name another."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(os.listdir(folder)):
        if name not in (MANIFEST, UNFINISHED) and not is_of_table(name):
            raise ValueError(
                f"{folder} holds {name!r}, which does not belong to a saved table: name a folder "
                "that does not exist, or one of an earlier save."
            )
    for name in (MANIFEST, UNFINISHED):
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            raise ValueError(
                f"{folder / name} is a folder, but a save writes a file of that name: move it away."
            )
    try:
        manifest = Manifest.read(folder)
    except ValueError:
        return  # the next commit removes other files
    remove_others(folder, manifest)


def remove_others(folder: Path, manifest: Manifest) -> None:
    """Removes shards and counters that do not belong to a manifest."""
    named = set(manifest.files)
    for name in os.listdir(folder):
        if is_of_table(name) and name not in named:
            (folder / name).unlink()
