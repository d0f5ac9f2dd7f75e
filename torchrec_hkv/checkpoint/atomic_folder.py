"""The folder of a checkpoint, and the folders beside it that a save uses."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from torchrec_hkv.checkpoint.exchange import exchange
from torchrec_hkv.checkpoint.record import LINK, RECORD, TABLES, TENSORS
from torchrec_hkv.file_sync import sync_folder

#: Names in the folder of a checkpoint.
_PARTS = frozenset({RECORD, TABLES, TENSORS, LINK})
#: Prefix of the file by which ranks check that they see the same folder.
_TOKEN = ".seen-"


class AtomicFolder:
    """The folder of a checkpoint, which a save replaces in one step.

    Args:
        path: the folder of the checkpoint, or a symbolic link to it.

    Raises:
        ValueError: the path has no name, so no folder can be created beside it, or it is a link to
            itself.
    """

    def __init__(self, path: Path) -> None:
        if path.name in ("", ".."):
            raise ValueError(
                f"'{path}' does not name a folder of its own: name one, such as checkpoints/last."
            )
        # If the path is a link, replaces its target, on the target's disk. Exchanging names with
        # the link itself would leave the old checkpoint there and stop the next save.
        if path.is_symlink():
            try:
                path = path.resolve()
            except (OSError, RuntimeError):  # the latter before Python 3.13
                raise ValueError(f"'{path}' is a symbolic link that leads to itself.") from None
        self.path = path
        self.saving = path.with_name(f".{path.name}.saving")
        self.previous = path.with_name(f".{path.name}.previous")

    def prepare(self) -> str:
        """Removes what a killed save left, and creates the folder to save to.

        Returns:
            A token for :meth:`check_visible` and :meth:`remove_token`.

        Raises:
            ValueError: the path holds something other than a checkpoint, or a folder beside it
                holds something other than the remains of a save.
        """
        if self.path.exists() and not (self.path / RECORD).is_file():
            raise ValueError(
                f"{self.path} is not a checkpoint and would be replaced by one: name a folder that "
                "doesn't exist, or an earlier checkpoint."
            )
        for leftover in (self.saving, self.previous):
            _check_only_saved(leftover)
        if self.saving.exists():
            shutil.rmtree(self.saving)
        self.saving.mkdir(parents=True)
        token = f"{_TOKEN}{os.urandom(8).hex()}"
        (self.saving / token).touch()
        return token

    def check_visible(self, token: str) -> None:
        """Checks that this rank sees the folder that rank 0 has created.

        Raises:
            ValueError: it does not, for example because the path is on another host's own disk.
        """
        if not (self.saving / token).exists():
            raise ValueError(
                f"A rank does not see {self.saving}, which rank 0 has made: name a folder on a "
                "file system that all ranks share."
            )

    def remove_token(self, token: str) -> None:
        """Removes the token. Call it when all ranks have seen the folder."""
        (self.saving / token).unlink()

    def check_only_saved(self) -> None:
        """Checks that the folder to save to holds only what a save writes.

        Raises:
            ValueError: it is a link or a file, or holds something else.
        """
        _check_only_saved(self.saving)

    def discard(self) -> None:
        """Removes what a failed save has written. Complete checkpoints stay."""
        shutil.rmtree(self.saving, ignore_errors=True)

    def commit(self) -> None:
        """Moves the saved folder to the path. A complete checkpoint exists at every moment: at the
        path itself if the file system can exchange two folders, otherwise where :meth:`newest`
        finds it."""
        if not (self.path.exists() and exchange(self.saving, self.path)):
            if self.path.exists():
                shutil.rmtree(self.previous, ignore_errors=True)
                self.path.rename(self.previous)
            self.saving.rename(self.path)
        sync_folder(self.path.absolute().parent)
        for leftover in (self.previous, self.saving):
            shutil.rmtree(leftover, ignore_errors=True)

    def newest(self) -> Path:
        """The last complete checkpoint, also if a save was killed between its two renames.

        Raises:
            ValueError: there is no checkpoint.
        """
        if (self.path / RECORD).is_file():
            return self.path
        # A save never creates a link of that name.
        if (self.previous / RECORD).is_file() and not self.previous.is_symlink():
            return self.previous
        raise ValueError(f"There is no checkpoint at {self.path}: name a folder that save wrote.")


def _check_only_saved(folder: Path) -> None:
    """Checks that a path holds only the remains of a save. Links are not followed.

    Raises:
        ValueError: it is a link or a file, or a folder that holds something else.
    """
    if folder.is_symlink():
        what = f"a symbolic link to {os.readlink(folder)!r}"
    elif not folder.exists():
        return
    elif not folder.is_dir():
        what = "a file"
    else:
        others = sorted(name for name in os.listdir(folder) if not _is_of_checkpoint(name))
        if not others:
            return
        what = f"a folder that holds {others[0]!r}, which is not of a checkpoint"
    raise ValueError(
        f"{folder} is {what}, but a save writes to that name before it replaces the "
        "checkpoint: move it away, or save to a path of another name."
    )


def _is_of_checkpoint(name: str) -> bool:
    return name in _PARTS or name.startswith(_TOKEN)
