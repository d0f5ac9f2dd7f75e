"""A chain: a base, which is a whole checkpoint, and deltas, each holding what changed since the one
before.

All are folders of one folder, ``base-000000``, ``delta-000001`` and so on, numbered through. Each
names the digest of the one before, and the folder's ``deltas.json`` names the newest, so that one
that is lost, doubled, out of order or of another chain is told.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Literal

from torchrec_hkv.checkpoint.place import Place as SavePlace
from torchrec_hkv.checkpoint.record import LINK, RECORD, Record
from torchrec_hkv.hash_table.files.manifest import sync_folder
from torchrec_hkv.hash_table.files.signed_json import read_signed, write_signed
from torchrec_hkv.json_schema import Choice, Fields, Integer, OrNull, Place, Text

#: The file of a chain that names its newest checkpoint.
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
    """Where in a chain a checkpoint is.

    Attributes:
        number: counted from 0, bases and deltas alike.
        kind: ``"base"`` or ``"delta"``.
        previous: digest of the checkpoint that a delta adds to; None for a base.
    """

    number: int
    kind: Kind
    previous: str | None

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.kind}-{self.number:06d}"

    def write(self, folder: Path) -> None:
        """Writes it to the folder of the checkpoint, and makes sure that it is on the disk."""
        write_signed(folder / LINK, _LINK_FORMAT, _VERSION, dataclasses.asdict(self), mode="x")

    @classmethod
    def read(cls, folder: Path) -> Link:
        """That of a checkpoint.

        Raises:
            ValueError: it is missing, damaged, or has an impossible value.
        """
        path = folder / LINK
        try:
            content = read_signed(path, _LINK_FORMAT, _VERSION, "a checkpoint in a chain")
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}.") from None
        link: Link = _LINK.read(content, Place(str(path)))
        if (link.kind == "base") != (link.previous is None):
            raise (
                Place(str(path))
                .of("previous")
                .refuse(link.previous, "null for a base, and a digest for a delta")
            )
        return link


@dataclasses.dataclass(frozen=True)
class Newest:
    """The newest checkpoint of a chain.

    Attributes:
        number: its number.
        digest: its digest.
    """

    number: int
    digest: str


_LINK = Fields(
    {"number": _NUMBER, "kind": Choice(("base", "delta")), "previous": OrNull(_DIGEST)}, Link
)
_NEWEST = Fields({"number": _NUMBER, "digest": _DIGEST}, Newest)


def digest_of(folder: Path) -> str:
    """The digest of a checkpoint in a chain: of the files that name all of its others with their
    checksums.

    Raises:
        ValueError: one can't be read.
    """
    total = hashlib.sha256()
    for name in (RECORD, LINK):
        try:
            total.update((folder / name).read_bytes())
        except OSError as error:
            raise ValueError(f"{folder / name} can't be read: {error.strerror}.") from None
    return total.hexdigest()


class Chain:
    """The checkpoints of a chain, up to one of them.

    Args:
        root: the folder that they are in.
        last: number of the last one that is wanted; None for the newest.
    """

    def __init__(self, root: Path, last: int | None = None) -> None:
        self._root, self._last = root, last

    @classmethod
    def at(cls, path: Path) -> Chain | None:
        """The chain that a path names: its own folder, or that of one of its checkpoints; None if
        it names none."""
        if (path / LINK).is_file():
            path = path.absolute()
            found = _NAME.fullmatch(path.name)
            if found is None:
                raise ValueError(
                    f"{path} is of a chain of deltas under another name: give it the name "
                    f"{Link.read(path).name!r} again."
                )
            return cls(path.parent, int(found[2]))
        if (path / RECORD).is_file():
            return None
        chain = cls(path)
        return chain if (path / NEWEST).is_file() or chain.names() else None

    def names(self) -> dict[int, str]:
        """The names of the folders by number, ascending.

        Raises:
            ValueError: two have the same number.
        """
        names: dict[int, str] = {}
        held = sorted(os.listdir(self._root)) if self._root.is_dir() else []
        for name in held:
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
        """What the folder says is its newest checkpoint; None where it says nothing.

        Raises:
            ValueError: what it says is damaged.
        """
        path = self._root / NEWEST
        try:
            content = read_signed(path, _NEWEST_FORMAT, _VERSION, "a chain of deltas")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}.") from None
        return _NEWEST.read(content, Place(str(path)))

    def layers(self) -> list[tuple[Path, Record]]:
        """The last checkpoint and those that it adds to, back to a base: folders and records.

        Raises:
            ValueError: one is missing or another than it should be; the sentence names it.
        """
        names, newest = self.names(), self.newest()
        last = self._last
        if last is None:
            last = max([*names, -1 if newest is None else newest.number])
            # Only the first write may have been killed before it could name itself.
            if newest is None and len(names) > 1:
                raise ValueError(
                    f"{self._root / NEWEST} is missing, so that nothing says which checkpoint of "
                    "the chain is the newest: name the folder of the one that is to be loaded."
                )
        self._check_there(names, last, newest)
        layers: list[tuple[Path, Record]] = []
        wanted = None  # digest that the next one back must have
        for number in range(last, -1, -1):
            folder = self._folder(names, number, layers)
            link = Link.read(folder)
            if link.name != folder.name:
                raise ValueError(f"{folder} is another checkpoint: it was saved as {link.name!r}.")
            digest = digest_of(folder)
            if wanted is not None and digest != wanted:
                raise ValueError(
                    f"{layers[-1][0]} does not follow {folder}: it adds to a checkpoint of digest "
                    f"{wanted}, but this one has {digest}. One of them is of another chain."
                )
            if newest is not None and number == newest.number and digest != newest.digest:
                raise ValueError(
                    f"{folder} is not of this chain: its digest is {digest}, but "
                    f"{self._root / NEWEST} names {newest.digest}."
                )
            layers.append((folder, Record.read(folder)))
            wanted = link.previous
            if link.kind == "base":
                return layers
        raise ValueError(f"{self._root} has no base for {layers[-1][0].name}.")

    def _check_there(self, names: dict[int, str], last: int, newest: Newest | None) -> None:
        if last not in names:
            named = newest is not None and last == newest.number
            why = f", which {NEWEST} names as the newest" if named else ""
            raise ValueError(f"{self._root} lacks checkpoint {last} of its chain{why}.")

    def _folder(
        self, names: dict[int, str], number: int, layers: list[tuple[Path, Record]]
    ) -> Path:
        if number not in names:
            raise ValueError(
                f"{self._root} lacks checkpoint {number} of its chain, which {layers[-1][0].name} "
                "adds to."
            )
        return self._root / names[number]

    # -- writing ----------------------------------------------------------------------------------

    def next_number(self) -> int:
        """The number after all that there are."""
        newest = self.newest()
        return 1 + max([*self.names(), -1 if newest is None else newest.number])

    def name_newest(self, link: Link, digest: str) -> None:
        """Says which checkpoint is the newest, in one step of the file system."""
        path = self._root / NEWEST
        unfinished = path.with_name(f".{NEWEST}.saving")
        content = dataclasses.asdict(Newest(link.number, digest))
        unfinished.unlink(missing_ok=True)
        write_signed(unfinished, _NEWEST_FORMAT, _VERSION, content, mode="x")
        unfinished.rename(path)
        sync_folder(self._root)

    def clear(self) -> None:
        """Removes what killed writers left."""
        for name in os.listdir(self._root) if self._root.is_dir() else []:
            found = _KILLED.fullmatch(name)
            if found is None:
                continue
            if found[4] == "saving":
                place = SavePlace(self._root / found[1])
                place.check_ours()
                place.discard()
            else:
                shutil.rmtree(self._root / name, ignore_errors=True)

    def keep_bases(self, count: int) -> None:
        """Removes the bases but for the newest ones, and the deltas that add to them."""
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
