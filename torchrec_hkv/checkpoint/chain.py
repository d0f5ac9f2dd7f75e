"""A chain: a base, which is a complete checkpoint, and deltas, each with what changed since the
previous one.

They are folders in one folder, ``base-000000``, ``delta-000001`` and so on, with consecutive
numbers. Each names the digest of its predecessor, and the file ``deltas.json`` names the newest.
A reader can thus detect checkpoints that are missing, duplicated, out of order or of another chain.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Literal

from torchrec_hkv.checkpoint.atomic_folder import AtomicFolder
from torchrec_hkv.checkpoint.record import LINK, RECORD, Record
from torchrec_hkv.file_sync import sync_folder
from torchrec_hkv.hash_table.files.signed_json import read_signed, write_signed
from torchrec_hkv.json_schema import Choice, Fields, Integer, JsonPlace, OrNull, Text

#: Name of the file that names the newest checkpoint of a chain.
NEWEST = "deltas.json"
_LINK_FORMAT = "torchrec_hkv.chain"
_NEWEST_FORMAT = "torchrec_hkv.deltas"
_VERSION = 1
_NAME = re.compile(r"(base|delta)-(\d{6,})")
_KILLED = re.compile(rf"\.({_NAME.pattern})\.(saving|removed)")
_DIGEST = Text(r"[0-9a-f]{64}", "64 hexadecimal digits")
_NUMBER = Integer(0, 10**12)

Kind = Literal["base", "delta"]


@dataclasses.dataclass(frozen=True)
class Link:
    """The position of a checkpoint in its chain.

    Attributes:
        number: counted from 0, over bases and deltas.
        kind: ``"base"`` or ``"delta"``.
        previous: digest of the checkpoint that a delta follows; None for a base.
    """

    number: int
    kind: Kind
    previous: str | None

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        return f"{self.kind}-{self.number:06d}"

    def write(self, folder: Path) -> None:
        """Writes the link to the folder of the checkpoint and syncs it."""
        write_signed(folder / LINK, _LINK_FORMAT, _VERSION, dataclasses.asdict(self), mode="x")

    @classmethod
    def read(cls, folder: Path) -> Link:
        """Reads the link of a checkpoint.

        Raises:
            ValueError: it is missing or damaged, or has an impossible value.
        """
        path = folder / LINK
        try:
            content = read_signed(path, _LINK_FORMAT, _VERSION, "a checkpoint in a chain")
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}.") from None
        link: Link = _LINK.read(content, JsonPlace(str(path)))
        if (link.kind == "base") != (link.previous is None):
            raise (
                JsonPlace(str(path))
                .of("previous")
                .refuse(link.previous, "null for a base, and a digest for a delta")
            )
        return link


@dataclasses.dataclass(frozen=True)
class Newest:
    """The newest checkpoint of a chain.

    Attributes:
        number: number of the checkpoint.
        digest: digest of the checkpoint.
    """

    number: int
    digest: str


_LINK = Fields(
    {"number": _NUMBER, "kind": Choice(("base", "delta")), "previous": OrNull(_DIGEST)}, Link
)
_NEWEST = Fields({"number": _NUMBER, "digest": _DIGEST}, Newest)


def digest_of(folder: Path) -> str:
    """The digest (SHA-256) of a checkpoint in a chain. It covers the two files that name all other
    files with their checksums.

    Raises:
        ValueError: one of the two can't be read.
    """
    total = hashlib.sha256()
    for name in (RECORD, LINK):
        try:
            total.update((folder / name).read_bytes())
        except OSError as error:
            raise ValueError(f"{folder / name} can't be read: {error.strerror}.") from None
    return total.hexdigest()


class Chain:
    """The checkpoints of a chain, up to a given one.

    Args:
        root: the folder of the chain.
        last: number of the last checkpoint; None for the newest.
    """

    def __init__(self, root: Path, last: int | None = None) -> None:
        self._root, self._last = root, last

    @classmethod
    def at(cls, path: Path) -> Chain | None:
        """The chain at a path, which is the folder of the chain or of one of its checkpoints. None
        if there is no chain."""
        if (path / LINK).is_file():
            path = path.absolute()
            found = _NAME.fullmatch(path.name)
            if found is None:
                raise ValueError(
                    f"{path} is a renamed checkpoint of a chain: rename it to "
                    f"{Link.read(path).name!r} again."
                )
            return cls(path.parent, int(found[2]))
        if (path / RECORD).is_file():
            return None
        chain = cls(path)
        return chain if (path / NEWEST).is_file() or chain.names() else None

    def names(self) -> dict[int, str]:
        """Names of the checkpoints' folders by number, ascending.

        Raises:
            ValueError: two folders have the same number.
        """
        names: dict[int, str] = {}
        entries = sorted(os.listdir(self._root)) if self._root.is_dir() else []
        for name in entries:
            found = _NAME.fullmatch(name)
            if found is None:
                continue
            number = int(found[2])
            if number in names:
                raise ValueError(
                    f"{self._root} holds both {names[number]} and {name}, which have the same "
                    "number: one of them is of another chain."
                )
            names[number] = name
        return dict(sorted(names.items()))

    def newest(self) -> Newest | None:
        """The newest checkpoint according to ``deltas.json``; None if there is no such file.

        Raises:
            ValueError: the file is damaged.
        """
        path = self._root / NEWEST
        try:
            content = read_signed(path, _NEWEST_FORMAT, _VERSION, "a chain of deltas")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}.") from None
        return _NEWEST.read(content, JsonPlace(str(path)))

    def layers(self) -> list[tuple[Path, Record]]:
        """Folders and records of the last checkpoint and of its predecessors, back to a base.

        Raises:
            ValueError: a checkpoint is missing, or is not the predecessor that the next one names;
                the message names it.
        """
        names, newest = self.names(), self.newest()
        last = self._last
        if last is None:
            last = max([*names, -1 if newest is None else newest.number])
            # Only a first write may have been killed before it wrote the file.
            if newest is None and len(names) > 1:
                raise ValueError(
                    f"{self._root / NEWEST} is missing, so that nothing says which checkpoint of "
                    "the chain is the newest: name the folder of the one that is to be loaded."
                )
        self._check_exists(names, last, newest)
        layers: list[tuple[Path, Record]] = []
        expected = None  # digest that the predecessor must have
        for number in range(last, -1, -1):
            folder = self._folder(names, number, layers)
            link = Link.read(folder)
            if link.name != folder.name:
                raise ValueError(f"{folder} is another checkpoint: it was saved as {link.name!r}.")
            digest = digest_of(folder)
            if expected is not None and digest != expected:
                raise ValueError(
                    f"{layers[-1][0]} does not follow {folder}: it adds to a checkpoint of digest "
                    f"{expected}, but this one has {digest}. One of them is of another chain."
                )
            if newest is not None and number == newest.number and digest != newest.digest:
                raise ValueError(
                    f"{folder} is not of this chain: its digest is {digest}, but "
                    f"{self._root / NEWEST} names {newest.digest}."
                )
            layers.append((folder, Record.read(folder)))
            expected = link.previous
            if link.kind == "base":
                return layers
        raise ValueError(
            f"{self._root} has no base that {layers[-1][0].name} adds to: restore it from a copy "
            "of the chain."
        )

    def _check_exists(self, names: dict[int, str], last: int, newest: Newest | None) -> None:
        if last not in names:
            named = newest is not None and last == newest.number
            why = f", which {NEWEST} names as the newest" if named else ""
            raise ValueError(
                f"{self._root} lacks checkpoint {last} of its chain{why}: restore it, or name the "
                "folder of the one that is to be loaded."
            )

    def _folder(
        self, names: dict[int, str], number: int, layers: list[tuple[Path, Record]]
    ) -> Path:
        if number not in names:
            raise ValueError(
                f"{self._root} lacks checkpoint {number} of its chain, which {layers[-1][0].name} "
                "adds to: restore it from a copy of the chain."
            )
        return self._root / names[number]

    # -- writing ----------------------------------------------------------------------------------

    def next_number(self) -> int:
        """The number of the next checkpoint."""
        newest = self.newest()
        return 1 + max([*self.names(), -1 if newest is None else newest.number])

    def name_newest(self, link: Link, digest: str) -> None:
        """Names the newest checkpoint in ``deltas.json``, atomically."""
        path = self._root / NEWEST
        unfinished = path.with_name(f".{NEWEST}.saving")
        content = dataclasses.asdict(Newest(link.number, digest))
        unfinished.unlink(missing_ok=True)
        write_signed(unfinished, _NEWEST_FORMAT, _VERSION, content, mode="x")
        unfinished.rename(path)
        sync_folder(self._root)

    def clear(self) -> None:
        """Removes unfinished folders of killed writers."""
        for name in os.listdir(self._root) if self._root.is_dir() else []:
            found = _KILLED.fullmatch(name)
            if found is None:
                continue
            if found[4] == "saving":
                place = AtomicFolder(self._root / found[1])
                place.check_only_saved()
                place.discard()
            else:
                shutil.rmtree(self._root / name, ignore_errors=True)

    def keep_bases(self, count: int) -> None:
        """Removes all but the newest bases, and the deltas of the removed ones.

        Args:
            count: number of bases to keep.
        """
        names = self.names()
        bases = [number for number, name in names.items() if name.startswith("base")]
        if len(bases) <= count:
            return
        for number, name in names.items():
            if number < bases[-count]:
                removed = self._root / f".{name}.removed"
                (self._root / name).rename(removed)
                shutil.rmtree(removed, ignore_errors=True)
        sync_folder(self._root)
