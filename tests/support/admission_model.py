"""Python models of admission, by the rules of csrc/hash_table/admission.h.

They share no code with it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from tests.support.initial_value import MASK, mix64, mixed_seed
from torchrec_hkv.hash_table import Admission, MinFrequency, Probability


class EveryId:
    """Admits every id."""

    def begin_call(self, call: int) -> None:
        """Begins a call."""
        self.call = call

    def admitted(self, missing: Sequence[int]) -> set[int]:
        """Returns the admitted ids among the missing ids of a call, which may repeat."""
        return set(missing)

    def clear(self) -> None:
        """Clears the counts."""


class CountedIds(EveryId):
    """Counts ids in cells, in the order of their first occurrence in a call, like on a CPU.

    Args:
        admission: an admission with ``entries``.
    """

    def __init__(self, admission: MinFrequency) -> None:
        assert admission.entries is not None
        self.admission = admission
        self.num_sets = -(-admission.entries // 8)
        self.forgotten = 0
        self.clear()

    def clear(self) -> None:
        """Clears the counts."""
        #: By set: 8 cells (id, count, last call).
        self.sets: dict[int, list[tuple[int, int, int] | None]] = {}

    def begin_call(self, call: int) -> None:
        """Begins a call; halves the counts if it is time to."""
        self.call = call
        every = self.admission.halve_every
        if every is not None and call % every == 0:
            for cells in self.sets.values():
                for at, cell in enumerate(cells):
                    if cell is not None:
                        id_, count, last = cell
                        cells[at] = (id_, count // 2, last) if count > 1 else None

    def admitted(self, missing: Sequence[int]) -> set[int]:
        """Counts all occurrences before any decision."""
        occurrences = collections.Counter(missing)  # in order of the first occurrence
        return {id_ for id_, times in occurrences.items() if self._count(id_, times)}

    def _count(self, id_: int, times: int) -> bool:
        hashed = mix64(id_ % 2**64 ^ 0xBB67AE8584CAA73B)
        cells = self.sets.setdefault((hashed >> 32) * self.num_sets >> 32, [None] * 8)
        cell_index = next((at for at, cell in enumerate(cells) if cell and cell[0] == id_), None)
        if cell_index is not None:
            times += cells[cell_index][1]
        if times >= self.admission.count:
            if cell_index is not None:
                cells[cell_index] = None
            return True
        if cell_index is None and None in cells:
            cell_index = cells.index(None)
        elif cell_index is None:
            self.forgotten += 1
            older = [(*cell[1:], at) for at, cell in enumerate(cells) if cell[2] != self.call]
            if not older:
                return False
            cell_index = min(older)[-1]
        cells[cell_index] = (id_, times, self.call)
        return False


class SketchedIds(EveryId):
    """Counts ids in a count-min sketch.

    Args:
        admission: an admission with ``sketch_bytes``.
    """

    ROWS = 4

    def __init__(self, admission: MinFrequency) -> None:
        assert admission.sketch_bytes is not None
        self.admission = admission
        cell_bytes = 1 if admission.count <= 255 else 2
        self.limit = 256**cell_bytes - 1
        self.width = admission.sketch_bytes // 16 * 4 // cell_bytes
        self.clear()

    def clear(self) -> None:
        """Clears the counts."""
        self.cells: collections.Counter[tuple[int, int]] = collections.Counter()

    def begin_call(self, call: int) -> None:
        """Begins a call; halves the counts if it is time to."""
        every = self.admission.halve_every
        if every is not None and call % every == 0:
            self.cells = collections.Counter({at: n // 2 for at, n in self.cells.items()})

    def _places(self, id_: int) -> list[tuple[int, int]]:
        key = mix64(id_ % 2**64 ^ 0x3C6EF372FE94F82B)
        hashes = [mix64(key + row & MASK) for row in range(self.ROWS)]
        return [(row, (hashed >> 32) * self.width >> 32) for row, hashed in enumerate(hashes)]

    def admitted(self, missing: Sequence[int]) -> set[int]:
        """Counts all occurrences before any decision."""
        for id_ in missing:
            for place in self._places(id_):
                self.cells[place] = min(self.limit, self.cells[place] + 1)
        return {id_ for id_ in missing if self.estimate(id_) >= self.admission.count}

    def estimate(self, id_: int) -> int:
        """Returns the sketch's count of an id."""
        return min(self.cells[place] for place in self._places(id_))


@dataclasses.dataclass
class DrawnIds(EveryId):
    """Admits ids at random.

    Attributes:
        p: probability of admission.
        table: the table's name.
        seed: the table's seed.
    """

    p: float
    table: str
    seed: int

    def admitted(self, missing: Sequence[int]) -> set[int]:
        """Makes one draw per id."""
        return {id_ for id_ in missing if self._draw(id_) < self.p}

    def _draw(self, id_: int) -> float:
        seed = mixed_seed(self.table, self.seed)
        key = mix64(seed ^ mix64(id_ + 0xA54FF53A5F1D36F1 & MASK))
        return (mix64(key ^ mix64(self.call + 0x510E527FADE682D1 & MASK)) >> 11) / 2**53


def admission_model(admission: Admission | None, table: str, seed: int) -> EveryId:
    """Creates the model of a table's admission."""
    match admission:
        case None:
            return EveryId()
        case MinFrequency(sketch_bytes=None):
            return CountedIds(admission)
        case MinFrequency():
            return SketchedIds(admission)
        case Probability(p):
            return DrawnIds(p, table, seed)
    raise AssertionError(admission)
