"""Eviction policies, and which of them can load each other's files."""

from __future__ import annotations

import dataclasses
from typing import Literal

from torch import Tensor

from torchrec_hkv import _C


@dataclasses.dataclass(frozen=True)
class AgedLFU:
    """LFU with aging counts: the count of an id halves in each half-life without a lookup, and the
    id with the lowest aged count is evicted.

    The policy lies between LRU and LFU. Unlike in LRFU, a hit adds to the full count, not to the
    aged count, so it costs no more than under LFU. The victim is the id with the lowest
    ``last lookup + half-life * log2(count)``.

    Attributes:
        c: the half-life, in lookups of the table per slot: in a table with 1 M slots, 3 means 3 M
            lookups. 0 is LRU, infinity is LFU. The table measures time in calls, and the mean
            number of lookups in a call.

    Raises:
        ValueError: ``c`` is not a number of at least 0.
    """

    c: float = 3.0

    def __post_init__(self) -> None:
        check_c("AgedLFU", self.c)
        object.__setattr__(self, "c", float(self.c))


#: The half-life c of an ``"adaptive"`` table before it first chooses one. It is lower than the
#: default of ``AgedLFU``, because then a table whose ids all change loses less until the choice.
FIRST_C = 2.0

EvictionPolicy = Literal["lru", "lfu", "adaptive", "epoch_lru", "epoch_lfu", "customized"] | AgedLFU

#: The policies that are strings, and the policies that use epochs.
POLICIES = ("lru", "lfu", "adaptive", "epoch_lru", "epoch_lfu", "customized")
EPOCH_POLICIES = ("epoch_lru", "epoch_lfu")

#: Policies by their names in files.
KINDS = {
    "lru": _C.Eviction.LRU,
    "lfu": _C.Eviction.LFU,
    "epoch_lru": _C.Eviction.EPOCH_LRU,
    "epoch_lfu": _C.Eviction.EPOCH_LFU,
    "customized": _C.Eviction.CUSTOMIZED,
    "aged_lfu": _C.Eviction.AGED_LFU,
}
#: Policies that know when an id was looked up last and, except LRU, how often.
_CONVERTIBLE = ("lru", "lfu", "aged_lfu")


def check_c(where: str, c: object) -> None:
    """Checks that ``c`` is a half-life.

    Raises:
        ValueError: it is not; the message starts with ``where``.
    """
    if isinstance(c, bool) or not isinstance(c, (int, float)) or not c >= 0:
        raise ValueError(f"{where}: c is {c!r}, but must be a number of at least 0.")


def check_eviction(where: str, eviction: object, allowed: tuple[str, ...]) -> None:
    """Checks an eviction policy. An :class:`AgedLFU` is always allowed.

    Args:
        where: start of the error message.
        eviction: the value to check.
        allowed: the allowed policies that are strings.

    Raises:
        ValueError: the policy is not allowed; the message lists the allowed ones.
    """
    if isinstance(eviction, AgedLFU) or eviction in allowed:
        return
    names = ", ".join(map(repr, allowed))
    raise ValueError(
        f"{where}: eviction is {eviction!r}, but must be one of {names}, or an AgedLFU."
    )


def name_of(eviction: EvictionPolicy) -> str:
    """Name of a policy in files, which do not store its parameters."""
    return "aged_lfu" if isinstance(eviction, AgedLFU) or eviction == "adaptive" else eviction


def policy_of(name: str) -> EvictionPolicy:
    """The policy with this name in files."""
    return AgedLFU() if name == "aged_lfu" else name  # type: ignore[return-value]


def keeps_scores(eviction: EvictionPolicy | str) -> bool:
    """Whether a policy, or a policy's name in files, stores scores, 8 bytes a slot."""
    return eviction != "lru"


def sums_scores(eviction: EvictionPolicy | str) -> bool:
    """Whether the score of an id is, or includes, a sum of its lookups."""
    return name_of(eviction) in ("lfu", "aged_lfu", "epoch_lfu")  # type: ignore[arg-type]


def counts_in(scores: Tensor, name: str) -> Tensor:
    """The numbers of lookups in int64 scores of a policy that sums them, by its name in files."""
    return scores & 0xFFFFFFFF if name == "epoch_lfu" else scores


def can_load_policy(policy: str, saved_policy: str) -> bool:
    """Whether a table with ``policy`` can load files of one with ``saved_policy``.

    If the saved table has no counts, each id gets the count 1.
    """
    return policy == saved_policy or (policy in _CONVERTIBLE and saved_policy in _CONVERTIBLE)
