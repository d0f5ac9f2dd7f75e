"""Policies of replayed tables: eviction, admission and expiry."""

from __future__ import annotations

import dataclasses
import typing

from torchrec_hkv.backends.hkv import HKVOptions
from torchrec_hkv.hash_table import Admission, AgedLFU, MinFrequency, Probability, TableSpec
from torchrec_hkv.hash_table.eviction import name_of

#: Policies that need more input than ids.
_NEED_SCORES = ("customized",)
#: Name of ``AgedLFU``, followed by its ``c``.
_AGED = "aged_lfu"
#: Policies with epochs.
EPOCHS = ("epoch_lru", "epoch_lfu")


def evictions() -> tuple[str, ...]:
    """Names of the policies of ``HKVOptions`` that need only ids."""
    hint = typing.get_type_hints(HKVOptions)["eviction"]
    return tuple(name for name in _literals(hint) if name not in _NEED_SCORES)


def parse_eviction(text: str) -> str | AgedLFU:
    """Parses the name of a policy, or ``aged_lfu:C`` for ``AgedLFU(c=C)``.

    Raises:
        ValueError: the name is unknown, or C is not a number of at least 0.
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
            f"The eviction is {text!r}, but must be in {', '.join(evictions())}, {_AGED}:C."
        )
    return text


def _literals(hint: object) -> tuple[str, ...]:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return arguments
    return tuple(name for argument in arguments for name in _literals(argument))


@dataclasses.dataclass(frozen=True)
class Rule:
    """Admission of a table with any number of rows.

    Attributes:
        count: ``count`` of a :class:`MinFrequency`, or 0.
        entries: its ``entries``. None: twice the rows, if there is no sketch.
        sketch_bytes: its ``sketch_bytes``, or None to count exactly.
        probability: ``p`` of a :class:`Probability`, or 0.
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
            rows: rows of the table.
            rate: share of the ids that are replayed. Entries and sketches are scaled by it.
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
    """The eviction, admission and expiry of a table.

    Attributes:
        eviction: one of :func:`evictions`, or an :class:`AgedLFU`.
        rule: admission.
        expire_after: steps without a lookup after which an id expires. None: never.
        epoch_samples: samples in an epoch, for policies with epochs, else None.
    """

    eviction: str | AgedLFU
    rule: Rule = Rule()
    expire_after: int | None = None
    epoch_samples: int | None = None

    def spec(self, rows: int, rate: float = 1.0) -> TableSpec:
        """Creates a table of one column with this policy.

        Args:
            rows: rows of the table in training.
            rate: share of the ids that are replayed. The rows are scaled by it.
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
        """The options of a table with this policy."""
        return HKVOptions(
            eviction=self.eviction,
            admission=self.rule.admission(rows),
            expire_after=self.expire_after,
        )

    def code(self, rows: int) -> str:
        """:meth:`options` as Python code, with the eviction and the values that differ from the
        defaults."""
        options, default = self.options(rows), HKVOptions()
        changed = [
            f"{field.name}={getattr(options, field.name)!r}"
            for field in dataclasses.fields(options)
            if field.name == "eviction"
            or getattr(options, field.name) != getattr(default, field.name)
        ]
        code = f"HKVOptions({', '.join(changed)})"
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
        """The text that :func:`parse_eviction` parses."""
        if isinstance(self.eviction, AgedLFU):
            return f"{_AGED}:{self.eviction.c:g}"
        return self.eviction

    def __str__(self) -> str:
        return self.eviction_text + ("" if self.rule == Rule() else f", {self.rule}")
