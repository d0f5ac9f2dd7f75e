"""Admission: which new ids get a slot of a table.

A new id that is not admitted has no slot: its lookup returns its initial row, it is not trained,
and the counter ``unadmitted`` counts it. All occurrences of an id in one call are counted before
the id is decided.
"""

from __future__ import annotations

import dataclasses
import math

from torchrec_hkv import _C

#: Number of cells in which an id can be counted.
SET_ENTRIES = 8


class Admission:
    """Base class of admission rules: :class:`MinFrequency` and :class:`Probability`."""


@dataclasses.dataclass(frozen=True)
class MinFrequency(Admission):
    """Admits an id once training lookups and insertions have asked for it ``count`` times.

    Every occurrence counts, including those in the current call: an id that occurs ``count`` times
    in one call is admitted at once. Ids in the table are not counted. Pass exactly one of
    ``entries`` and ``sketch_bytes``:

    - ``entries`` counts exactly, in cells of 16 bytes. An id has 8 possible cells. If all are
      taken, the lowest count is dropped (among equals the least recently requested one; never one
      of the same call), and its id starts from zero if it returns. A rare id may therefore be
      admitted late, but never early. Pass twice the number of ids that are counted at a time. A
      cell is free again when its id is admitted.
    - ``sketch_bytes`` counts any number of ids in a count-min sketch of four rows. A count is never
      too low. It is too high by more than ``e * asked / width`` with a probability of at most 1.8 %
      (``e ** -4``). ``asked`` is the number of occurrences counted so far. ``width`` is the number
      of cells in a row: ``sketch_bytes / 4`` for a ``count`` up to 255, else ``sketch_bytes / 8``.
      Without ``halve_every`` a sketch fills up in time and admits every id.

    The counts belong to the table: its memory includes them, ``clear`` removes them, and files hold
    them.

    Attributes:
        count: number of occurrences after which an id is admitted, 2 to 65535.
        entries: number of ids that can be counted at a time, 1 to 2^32; rounded up to a multiple
            of 8.
        sketch_bytes: size of the sketch, 16 to 2^34; rounded down to a multiple of 16.
        halve_every: number of counted calls after which all counts are halved, so that old
            occurrences weigh less; 1 to 2^32 - 1. None: counts are never halved.
    """

    count: int
    entries: int | None = None
    sketch_bytes: int | None = None
    halve_every: int | None = None

    def __post_init__(self) -> None:
        _check_int("MinFrequency: count", self.count, 2, 65535)
        if (self.entries is None) == (self.sketch_bytes is None):
            which = "neither" if self.entries is None else "both"
            raise ValueError(
                f"MinFrequency: {which} of entries and sketch_bytes was given, but exactly one "
                "must be: how many ids to count exactly, or the size of a sketch."
            )
        if self.entries is not None:
            _check_int("MinFrequency: entries", self.entries, 1, 1 << 32)
        if self.sketch_bytes is not None:
            _check_int("MinFrequency: sketch_bytes", self.sketch_bytes, 16, 1 << 34)
        if self.halve_every is not None:
            _check_int("MinFrequency: halve_every", self.halve_every, 1, (1 << 32) - 1)


@dataclasses.dataclass(frozen=True)
class Probability(Admission):
    """Admits each missing id with a fixed probability, drawn again in each call.

    The draw is a function of the table's seed and name, the id and the number of the call. It is
    the same on every device and for all occurrences of an id in a call. On average an id is
    admitted after ``1 / p`` calls.

    Attributes:
        p: the probability, greater than 0 and at most 1.
    """

    p: float

    def __post_init__(self) -> None:
        is_number = isinstance(self.p, (int, float)) and not isinstance(self.p, bool)
        if not is_number or math.isnan(self.p) or not 0 < self.p <= 1:
            raise ValueError(f"Probability: p is {self.p!r}, but must be above 0 and at most 1.")


def admission_config(admission: Admission | None) -> _C.AdmissionConfig:
    """The admission rule as the kernels take it.

    Raises:
        ValueError: ``admission`` is not a rule of this module.
    """
    config = _C.AdmissionConfig()
    if admission is None:
        return config
    if isinstance(admission, Probability):
        config.kind = _C.AdmissionKind.PROBABILITY
        config.probability = float(admission.p)
    elif isinstance(admission, MinFrequency):
        config.count = admission.count
        config.halve_every = admission.halve_every or 0
        if admission.entries is not None:
            config.kind = _C.AdmissionKind.COUNTED
            config.entries = admission.entries
        else:
            config.kind = _C.AdmissionKind.SKETCHED
            config.sketch_bytes = admission.sketch_bytes
    else:
        raise ValueError(
            f"admission is {admission!r}, but must be a MinFrequency or a Probability, or None."
        )
    return config


def admission_bytes(admission: Admission | None) -> int:
    """Bytes of a table's admission counters."""
    return _C.admission_bytes(admission_config(admission))


def _check_int(what: str, value: object, minimum: int, maximum: int) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not minimum <= value <= maximum:
        raise ValueError(
            f"{what} is {value!r}, but must be an integer from {minimum} to {maximum}."
        )
