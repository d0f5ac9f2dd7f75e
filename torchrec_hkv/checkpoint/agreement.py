"""Checks that all ranks pass the same arguments to a collective call."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchrec_hkv.collective import on_every_rank


@dataclasses.dataclass(frozen=True)
class Folder:
    """A path on one rank.

    Attributes:
        path: the absolute path.
        real: the absolute path with symbolic links resolved.
    """

    path: str
    real: str

    @classmethod
    def of(cls, path: Path) -> Folder:
        """Creates it for a path on this rank."""
        return cls(os.path.abspath(path), os.path.realpath(path))

    def is_same(self, other: Folder) -> bool:
        """Whether two ranks name the same folder. A host may reach it through its own links, or by
        another path that is the same once links are resolved."""
        return self.path == other.path or self.real == other.real

    def __repr__(self) -> str:
        return repr(self.path)


def agreed(arguments: Callable[[], Mapping[str, Any]]) -> None:
    """Compares the arguments of all ranks. Call it before anything changes; a collective call.

    Args:
        arguments: a function that checks this rank's arguments and returns those that must be equal
            on all ranks. Keys are the names used in error messages; values are picklable.

    Raises:
        ValueError: a rank refused its arguments, or two ranks were given different ones. All ranks
            raise the same error.
    """
    first, *others = on_every_rank(lambda: dict(arguments()))
    for rank, rank_value in enumerate(others, start=1):
        for what, value in first.items():
            other = rank_value[what]
            is_same = value.is_same(other) if isinstance(value, Folder) else value == other
            if not is_same:
                raise ValueError(
                    f"The ranks were given different arguments: {what} is {value!r} on rank 0 and "
                    f"{other!r} on rank {rank}. Give all ranks the same."
                )
