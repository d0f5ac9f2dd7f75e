"""All lanes in the mask of a warp-wide call in the CUDA sources reach that call."""

from __future__ import annotations

import re
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"

#: A call by all lanes of a warp: an instruction, or a method of ``Tile``.
CALL = (
    r"(?:\b__\w+_sync|(?:\bLanes::|\bTile<\w+>::|\btile\.)"
    r"(?:any|ballot|bits_of_all|largest|of_lane|of_lane_before|reduce|sum))\("
)
#: A call on the right of &&, || or ?, which some lanes may skip.
SKIPPED = re.compile(rf"(?:&&|\|\||\?)(?:(?!{CALL})[^;{{}}])*{CALL}")

#: Conditions that are equal for all lanes of a warp.
UNIFORM = re.compile(
    r"(?:\bscaled|\bkScaled|\bkWeighted|\bturn < 2|\bkAlone|\bkLanes == kWarp)\s*$"
)


def _skipped(source: str) -> list[str]:
    code = re.sub(r"//[^\n]*", "", source)
    found = []
    for match in SKIPPED.finditer(code):
        statement = re.split(r"[;{}]", code[: match.start()])[-1]
        if not UNIFORM.search(statement):
            found.append(" ".join((statement + match[0]).split()))
    return found


def test_no_lane_skips_a_call():
    found = {
        f"{path.relative_to(CSRC)}: {text}"
        for path in sorted(CSRC.rglob("*.cu*"))
        for text in _skipped(path.read_text())
    }
    assert not found


def test_lanes_come_from_votes():
    """``__activemask`` returns the lanes that happen to run together, which may differ between
    lanes."""
    found = [p.name for p in CSRC.rglob("*.cu*") if "__activemask()" in p.read_text()]
    assert not found


def test_what_is_found():
    bad = "const bool same = counted && entry == __shfl_sync(kAllLanes, entry, first);"
    assert _skipped(bad) == ["const bool same = counted && entry == __shfl_sync("]
    bad = "goes_on = last && (Lanes::ballot(ends) >> 1) == 0;"
    assert _skipped(bad) == ["goes_on = last && (Lanes::ballot("]
    assert not _skipped("if (__all_sync(kAllLanes, a || b)) f();")
    assert not _skipped("const float factor = kWeighted ? __shfl_sync(lanes, w, of) : 1.0f;")
