"""A checkpoint's folder, what is being saved beside it, and what was there before."""

from __future__ import annotations

import shutil
from pathlib import Path

from torchrec_hkv.checkpoint.exchange import exchange
from torchrec_hkv.checkpoint.record import RECORD
from torchrec_hkv.hash_table.files.manifest import sync_folder


class Place:
    """Where a checkpoint is saved to.

    Args:
        path: the folder that users name, or a symbolic link to it.

    Raises:
        ValueError: nothing can stand beside it.
    """

    def __init__(self, path: Path) -> None:
        if path.name in ("", ".."):
            raise ValueError(f"'{path}' is no folder with a name of its own: name a new one.")
        # A link stays and the folder that it names is replaced, on its own disk: to change names
        # with the link itself would leave the old checkpoint there and stop the next save.
        path = path.resolve() if path.is_symlink() else path
        self.path = path
        self.saving = path.with_name(f".{path.name}.saving")
        self.previous = path.with_name(f".{path.name}.previous")

    def prepare(self) -> None:
        """Clears what a killed save left.

        Raises:
            ValueError: there is something else than a checkpoint.
        """
        if self.path.exists() and not (self.path / RECORD).is_file():
            raise ValueError(
                f"{self.path} is not a checkpoint and would be replaced by one: name a folder that "
                "doesn't exist, or an earlier checkpoint."
            )
        shutil.rmtree(self.saving, ignore_errors=True)
        self.saving.mkdir(parents=True)

    def commit(self) -> None:
        """Puts what was saved in its place. At every moment a whole checkpoint is found: at the
        path itself where the file system can exchange two folders, else by :meth:`newest`."""
        if not (self.path.exists() and exchange(self.saving, self.path)):
            if self.path.exists():
                shutil.rmtree(self.previous, ignore_errors=True)
                self.path.rename(self.previous)
            self.saving.rename(self.path)
        sync_folder(self.path.absolute().parent)
        for left in (self.previous, self.saving):
            shutil.rmtree(left, ignore_errors=True)

    def newest(self) -> Path:
        """The last whole checkpoint: a save may have been killed between its two renames.

        Raises:
            ValueError: there is none.
        """
        for folder in (self.path, self.previous):
            if (folder / RECORD).is_file():
                return folder
        raise ValueError(f"There is no checkpoint at {self.path}: name a folder that save wrote.")
