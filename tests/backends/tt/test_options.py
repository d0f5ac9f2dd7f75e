"""``TTOptions`` refuses bad values at construction, in one sentence with the field and the
value."""

from __future__ import annotations

import math

import pytest

from torchrec_hkv import TTOptions

NO_SIZE = [True, 0, -1, 2.5, "4", math.nan, 1 << 64]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *(({"ranks": value}, "ranks has") for value in NO_SIZE),
        *(({"ranks": (4, value)}, "ranks has") for value in NO_SIZE),
        *(({"p": (4, value, 3)}, "p has") for value in NO_SIZE),
        *(({"q": (4, value, 3)}, "q has") for value in NO_SIZE),
        *(({"max_bytes": value}, "max_bytes has") for value in NO_SIZE),
        *(({"num_cores": value}, "number of cores is") for value in [*NO_SIZE, 1, 5]),
        *(
            ({"compression_ratio": value}, "compression_ratio is")
            for value in (True, 0, -1, 0.5, "4", math.nan, math.inf)
        ),
        ({"ranks": ()}, "number of cores is 1, but must be 2, 3 or 4"),
        ({"p": 9}, "p is 9, but must be a sequence of integers"),
        ({"q": "444"}, "q is '444', but must be a sequence of integers"),
        ({"p": (9, 9), "q": (2, 2, 2)}, r"q is \[2, 2, 2\], but 2 cores need 2 factors"),
        ({"p": (9, 9), "num_cores": 3}, r"p is \[9, 9\], but 3 cores need 3 factors"),
        ({"p": (9, 9), "ranks": (4, 4)}, r"ranks are \[4, 4\], but 2 cores need 1 of them"),
        ({"ranks": 3, "max_bytes": 9}, "ranks and max_bytes were given, but at most one"),
        ({"ranks": 3, "compression_ratio": 9}, "ranks and compression_ratio were given"),
        ({"weight_dist": "zeros"}, "weight_dist is 'zeros', but must be one of 'uniform'"),
        ({"weight_dist": None}, "weight_dist is None"),
        ({"precision": "fp16"}, "precision is 'fp16', but must be 'fp32' or 'tf32'"),
        *(({"seed": value}, "seed is") for value in (True, 0.5, "1", None, 1 << 63)),
        *(({"strict": value}, "strict is .* True or False") for value in (1, None, "yes")),
        *(({"cache_size": value}, "cache_size is") for value in (True, -1, 2.5, None, 1 << 64)),
        *(
            ({"cache_size": 8, "cache_counted_ids": value}, "cache_counted_ids is .* from 8 to")
            for value in (True, 7, 9.5, "9", 1 << 64)
        ),
        *(
            ({"cache_size": 8, "cache_populate_every": value}, "cache_populate_every is .* from 1")
            for value in (True, 0, 9.5, "9", 1 << 64)
        ),
        ({"cache_counted_ids": 9}, "cache_counted_ids is 9, but cache_size is 0"),
        ({"cache_populate_every": 9}, "cache_populate_every is 9, but cache_size is 0"),
    ],
)
def test_refused(options, match):
    with pytest.raises(ValueError, match=rf"^TTOptions: .*{match}") as refusal:
        TTOptions(**options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 1},
        {"ranks": (4,)},
        {"ranks": [4, 5, 6], "p": [9, 9, 9, 9]},
        {"compression_ratio": 1},
        {"max_bytes": 1 << 40},
        {"seed": -(1 << 63)},
        {"cache_size": 8, "cache_counted_ids": 8, "cache_populate_every": 1},
    ],
)
def test_bounds_are_taken(options):
    assert hash(TTOptions(**options)) == hash(TTOptions(**options))
