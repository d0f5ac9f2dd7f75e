"""A checkpoint's folder, what is being saved beside it, and what was there before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from torchrec_hkv.checkpoint.exchange import exchange
from torchrec_hkv.checkpoint.record import LINK, RECORD, TABLES, TENSORS
from torchrec_hkv.hash_table.files.manifest import sync_folder

#: What a checkpoint has in its folder.
_PARTS = frozenset({RECORD, TABLES, TENSORS, LINK})
#: Begins the name of a file by which ranks see that they share the folder.
_TOKEN = ".seen-"


class Place:
    """Where a checkpoint is saved to.

    Args:
        path: the folder that users name, or a symbolic link to it.

    Raises:
        ValueError: nothing can stand beside it, or it is a link that leads to itself.
    """

    def __init__(self, path: Path) -> None:
        if path.name in ("", ".."):
            raise ValueError(f"'{path}' is no folder with a name of its own: name a new one.")
        # A link stays and the folder that it names is replaced, on its own disk: to change names
        # with the link itself would leave the old checkpoint there and stop the next save.
        if path.is_symlink():
            try:
                path = path.resolve()
            except (OSError, RuntimeError):  # the latter before Python 3.13
                raise ValueError(f"'{path}' is a symbolic link that leads to itself.") from None
        self.path = path
        self.saving = path.with_name(f".{path.name}.saving")
        self.previous = path.with_name(f".{path.name}.previous")

    def prepare(self) -> str:
        """Clears what a killed save left, and makes the folder to save to.

        Returns:
            A token, for :meth:`check_seen` and :meth:`remove_token`.

        Raises:
            ValueError: there is something else than a checkpoint, or than what a save leaves.
        """
        if self.path.exists() and not (self.path / RECORD).is_file():
            raise ValueError(
                f"{self.path} is not a checkpoint and would be replaced by one: name a folder that "
                "doesn't exist, or an earlier checkpoint."
            )
        for left in (self.saving, self.previous):
            _check_ours(left)
        if self.saving.exists():
            shutil.rmtree(self.saving)
        self.saving.mkdir(parents=True)
        token = f"{_TOKEN}{os.urandom(8).hex()}"
        (self.saving / token).touch()
        return token

    def check_seen(self, token: str) -> None:
        """Refuses a folder that this rank does not see as rank 0 made it.

        Raises:
            ValueError: it is another, such as one on a disk of another host.
        """
        if not (self.saving / token).exists():
            raise ValueError(
                f"A rank does not see {self.saving}, which rank 0 has made: name a folder on a "
                "file system that all ranks share."
            )

    def remove_token(self, token: str) -> None:
        """To be called once all ranks have seen the folder."""
        (self.saving / token).unlink()

    def check_ours(self) -> None:
        """Refuses to remove what no save has left.

        Raises:
            ValueError: where a save writes first is a link, a file, or something else.
        """
        _check_ours(self.saving)

    def discard(self) -> None:
        """Removes what a failed save has written. Checkpoints stay."""
        shutil.rmtree(self.saving, ignore_errors=True)

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
        if (self.path / RECORD).is_file():
            return self.path
        # No save makes a link of that name.
        if (self.previous / RECORD).is_file() and not self.previous.is_symlink():
            return self.previous
        raise ValueError(f"There is no checkpoint at {self.path}: name a folder that save wrote.")


def _check_ours(left: Path) -> None:
    """Refuses to remove what no save has left. Links are not followed.

    Raises:
        ValueError: it is a link, a file, or a folder that holds something else.
    """
    if left.is_symlink():
        what = f"a symbolic link to {os.readlink(left)!r}"
    elif not left.exists():
        return
    elif not left.is_dir():
        what = "a file"
    else:
        others = sorted(name for name in os.listdir(left) if not _is_ours(name))
        if not others:
            return
        what = f"a folder that holds {others[0]!r}, which is not of a checkpoint"
    raise ValueError(
        f"{left} is {what}, but a save needs that name for the time until it replaces the "
        "checkpoint: move it away, or save to a path of another name."
    )


def _is_ours(name: str) -> bool:
    return name in _PARTS or name.startswith(_TOKEN)
