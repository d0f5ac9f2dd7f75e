"""``IdFrequencies`` refuses bad values at construction, in one sentence."""

from __future__ import annotations

import math

import pytest

from torchrec_hkv.backends.workload import IdFrequencies


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"histogram": ()}, "histogram is empty"),
        *(({"histogram": value}, "must be a sequence of pairs") for value in (3, None, "12", 2.5)),
        *(
            ({"histogram": ((2, 5.0), pair)}, "must have pairs of a positive number of ids")
            for pair in (
                3,
                "ab",
                (1,),
                (1, 2, 3),
                (0, 1.0),
                (-1, 1.0),
                (2.5, 1.0),
                (True, 1.0),
                (math.nan, 1.0),
                (1, 0.0),
                (1, -1.0),
                (1, math.nan),
                (1, math.inf),
                (1, True),
            )
        ),
        *(({"lowest": value}, "lowest is .* an integer or None") for value in (True, 0.5, "0")),
        *(({"highest": value}, "highest is .* an integer or None") for value in (True, 0.5, "0")),
        ({"lowest": 5, "highest": 4}, "lowest is 5 and highest is 4"),
    ],
)
def test_refused(values, match):
    with pytest.raises(ValueError, match=f"^IdFrequencies: .*{match}"):
        IdFrequencies(**{"histogram": ((3, 2.0),), **values})


def test_what_it_takes():
    frequencies = IdFrequencies([[3, 2], (1.0, 9.5)], lowest=-4, highest=-4)
    assert frequencies.histogram == ((1, 9.5), (3, 2.0))
