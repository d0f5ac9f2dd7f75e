"""What a replayed table does with ids when it is full, and which ids it takes."""

from __future__ import annotations

import dataclasses
import typing

from torchrec_hkv.backends.hkv import HKVOptions
from torchrec_hkv.hash_table import Admission, AgedLFU, MinFrequency, Probability, TableSpec
from torchrec_hkv.hash_table.eviction import name_of

#: Policies that need more than ids.
_NEED_SCORES = ("customized",)
#: The name of an AgedLFU, before its c.
_AGED = "aged_lfu"
#: Policies whose epochs the user sets.
EPOCHS = ("epoch_lru", "epoch_lfu")


def evictions() -> tuple[str, ...]:
    """The names of the policies that ``HKVOptions`` takes and that ids alone decide."""
    hint = typing.get_type_hints(HKVOptions)["eviction"]
    return tuple(name for name in _literals(hint) if name not in _NEED_SCORES)


def parse_eviction(text: str) -> str | AgedLFU:
    """A policy by its name, or ``aged_lfu:C`` for ``AgedLFU(c=C)``.

    Raises:
        ValueError: there is none of that name, or C is no number of at least 0.
    """
    name, _, c = text.partition(":")
    if name == _AGED and c:
        try:
            return AgedLFU(c=float(c))
        except ValueError:
            raise ValueError(
                f"The eviction {text!r} must have a number of at least 0, such as {_AGED}:3."
            ) from None
    if text not in evictions():
        raise ValueError(
            f"The eviction is {text!r}, but must be of {', '.join(evictions())}, {_AGED}:C."
        )
    return text


def _literals(hint: object) -> tuple[str, ...]:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return arguments
    return tuple(name for argument in arguments for name in _literals(argument))


@dataclasses.dataclass(frozen=True)
class Rule:
    """Admission, for a table of any number of rows.

    Attributes:
        count: of a :class:`MinFrequency`; 0 for none.
        entries: that it counts; None: twice the rows, where there is no sketch.
        sketch_bytes: of its sketch; None: it counts exactly.
        probability: of a :class:`Probability`; 0 for none.
    """

    count: int = 0
    entries: int | None = None
    sketch_bytes: int | None = None
    probability: float = 0.0

    def __str__(self) -> str:
        if self.probability:
            return f"probability:{self.probability:g}"
        if not self.count:
            return "none"
        if self.sketch_bytes is not None:
            return f"frequency:{self.count}:{self.sketch_bytes >> 10}KiB"
        counted = "" if self.entries is None else f":{self.entries}"
        return f"frequency:{self.count}{counted}"

    def admission(self, rows: int, rate: float = 1.0) -> Admission | None:
        """The admission of a table.

        Args:
            rows: of the table.
            rate: share of its ids that are replayed, which take so much of what counts them.
        """
        if self.probability:
            return Probability(self.probability)
        if not self.count:
            return None
        if self.sketch_bytes is not None:
            return MinFrequency(self.count, sketch_bytes=max(16, round(rate * self.sketch_bytes)))
        entries = 2 * rows if self.entries is None else self.entries
        return MinFrequency(self.count, entries=max(1, round(rate * entries)))


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a table chooses among ids.

    Attributes:
        eviction: one of :func:`evictions`, or an :class:`AgedLFU`.
        rule: of admission.
        expire_after: steps after which an id that was not looked up is forgotten. None: never.
        epoch_samples: samples of an epoch, for the policies that have epochs. None for the others.
    """

    eviction: str | AgedLFU
    rule: Rule = Rule()
    expire_after: int | None = None
    epoch_samples: int | None = None

    def spec(self, rows: int, rate: float = 1.0) -> TableSpec:
        """A table of one column that follows the policy.

        Args:
            rows: of the table as it is to be used.
            rate: share of its ids that are replayed, which have so many of its rows.
        """
        return TableSpec(
            name="replay",
            capacity=max(1, round(rate * rows)),
            dim=1,
            eviction=self.eviction,
            admission=self.rule.admission(rows, rate),
            expire_after=self.expire_after,
        )

    def options(self, rows: int) -> HKVOptions:
        """The options of a table that follows the policy."""
        return HKVOptions(
            eviction=self.eviction,
            admission=self.rule.admission(rows),
            expire_after=self.expire_after,
        )

    def code(self, rows: int) -> str:
        """:meth:`options` as Python, with what differs from the defaults, and the eviction."""
        options, default = self.options(rows), HKVOptions()
        told = [
            f"{field.name}={getattr(options, field.name)!r}"
            for field in dataclasses.fields(options)
            if field.name == "eviction"
            or getattr(options, field.name) != getattr(default, field.name)
        ]
        code = f"HKVOptions({', '.join(told)})"
        return (
            code.replace(", entries=None", "")
            .replace(", sketch_bytes=None", "")
            .replace(", halve_every=None", "")
        )

    @property
    def ages(self) -> bool:
        """Whether counts age."""
        return name_of(self.eviction) == "aged_lfu"  # type: ignore[arg-type]

    @property
    def eviction_text(self) -> str:
        """What :func:`parse_eviction` reads."""
        if isinstance(self.eviction, AgedLFU):
            return f"{_AGED}:{self.eviction.c:g}"
        return self.eviction

    def __str__(self) -> str:
        return self.eviction_text + ("" if self.rule == Rule() else f", {self.rule}")
