"""Eviction policies, and which of them can read each other's files."""

from __future__ import annotations

import dataclasses
from typing import Literal

from torchrec_hkv import _C


@dataclasses.dataclass(frozen=True)
class AgedLFU:
    """LFU with aging: evicts the id of the lowest count, where a count is worth half as much after
    each half-life in which its id is not looked up.

    It is between LRU and LFU, as LRFU is. LRFU also ages the count of an id that comes back; here a
    hit adds to the whole count, so that it costs no more than under LFU. The victim is the id of
    the lowest ``last lookup + half-life * log2(count)``.

    Attributes:
        c: the half-life, in lookups of the table for each of its slots: of a table with 1 M slots,
            3 means 3 M lookups. 0 is LRU, infinity is LFU. Time is told in calls, whose mean number
            of lookups the table measures.

    Raises:
        ValueError: ``c`` is no number of at least 0.
    """

    c: float = 3.0

    def __post_init__(self) -> None:
        check_c("AgedLFU", self.c)
        object.__setattr__(self, "c", float(self.c))


EvictionPolicy = Literal["lru", "lfu", "adaptive", "epoch_lru", "epoch_lfu", "customized"] | AgedLFU

#: The policies that are strings, and those of them that know epochs.
POLICIES = ("lru", "lfu", "adaptive", "epoch_lru", "epoch_lfu", "customized")
EPOCH_POLICIES = ("epoch_lru", "epoch_lfu")

#: As files name the policies, and as kernels do.
KINDS = {
    "lru": _C.Eviction.LRU,
    "lfu": _C.Eviction.LFU,
    "epoch_lru": _C.Eviction.EPOCH_LRU,
    "epoch_lfu": _C.Eviction.EPOCH_LFU,
    "customized": _C.Eviction.CUSTOMIZED,
    "aged_lfu": _C.Eviction.AGED_LFU,
}
#: Policies that know of an id when it was looked up last, and, but for LRU, how often.
_CONVERTIBLE = ("lru", "lfu", "aged_lfu")


def check_c(where: str, c: object) -> None:
    """Refuses what is no half-life.

    Raises:
        ValueError: its sentence starts with ``where``.
    """
    if isinstance(c, bool) or not isinstance(c, (int, float)) or not c >= 0:
        raise ValueError(f"{where}: c is {c!r}, but must be a number of at least 0.")


def check_eviction(where: str, eviction: object, allowed: tuple[str, ...]) -> None:
    """Refuses what is no policy; :class:`AgedLFU` is one everywhere.

    Args:
        where: begins the sentence.
        eviction: what was given.
        allowed: the policies that are strings.

    Raises:
        ValueError: the sentence names what is allowed.
    """
    if isinstance(eviction, AgedLFU) or eviction in allowed:
        return
    names = ", ".join(map(repr, allowed))
    raise ValueError(
        f"{where}: eviction is {eviction!r}, but must be one of {names}, or an AgedLFU."
    )


def name_of(eviction: EvictionPolicy) -> str:
    """A policy as files name it; they don't keep its parameters."""
    return "aged_lfu" if isinstance(eviction, AgedLFU) or eviction == "adaptive" else eviction


def policy_of(name: str) -> EvictionPolicy:
    """The policy of a name."""
    return AgedLFU() if name == "aged_lfu" else name  # type: ignore[return-value]


def keeps_scores(eviction: EvictionPolicy | str) -> bool:
    """Whether a policy, or one that a file names, keeps 8 bytes of score a slot."""
    return eviction != "lru"


def sums_scores(eviction: EvictionPolicy | str) -> bool:
    """Whether the score of an id has its lookups, added up."""
    return name_of(eviction) in ("lfu", "aged_lfu", "epoch_lfu")  # type: ignore[arg-type]


def reads_files_of(own: str, saved: str) -> bool:
    """Whether a table of one policy loads what a table of another has saved.

    Where the saved one kept no counts, each id counts once.
    """
    return own == saved or (own in _CONVERTIBLE and saved in _CONVERTIBLE)
