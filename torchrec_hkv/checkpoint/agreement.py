"""What all ranks must say alike in a collective call, refused where they don't."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchrec_hkv.collective import on_every_rank


@dataclasses.dataclass(frozen=True)
class Folder:
    """A path as one rank names it.

    Attributes:
        path: made absolute.
        real: without symbolic links.
    """

    path: str
    real: str

    @classmethod
    def of(cls, path: Path) -> Folder:
        """A path on this rank."""
        return cls(os.path.abspath(path), os.path.realpath(path))

    def is_same(self, other: Folder) -> bool:
        """Whether two ranks mean one folder. Hosts may reach it through links of their own, or by
        other paths that are the same without links."""
        return self.path == other.path or self.real == other.real

    def __repr__(self) -> str:
        return repr(self.path)


def agreed(arguments: Callable[[], Mapping[str, Any]]) -> None:
    """Compares what the ranks were given, before anything changes; a collective call.

    Args:
        arguments: checks this rank's arguments, and returns those that all ranks must have, by
            what a message calls them; picklable.

    Raises:
        ValueError: a rank refused its arguments, or two ranks were given different ones; the same
            on all ranks.
    """
    first, *others = on_every_rank(lambda: dict(arguments()))
    for rank, theirs in enumerate(others, start=1):
        for what, value in first.items():
            other = theirs[what]
            is_same = value.is_same(other) if isinstance(value, Folder) else value == other
            if not is_same:
                raise ValueError(
                    f"The ranks were given different arguments: {what} is {value!r} on rank 0 and "
                    f"{other!r} on rank {rank}. Give all ranks the same."
                )
