"""A few pairwise cases cover each pair of values."""

import itertools
import random

from tests.support.pairwise import pairwise


def pairs(cases):
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_every_pair_occurs_and_cases_are_few(monkeypatch):
    monkeypatch.delenv("TORCHREC_HKV_ALL_CASES", raising=False)
    for _ in range(20):
        axes = [range(random.randint(1, 5)) for _ in range(random.randint(2, 5))]
        product = list(itertools.product(*axes))
        cases = pairwise(*axes)
        assert pairs(cases) == pairs(product)
        assert len(set(cases)) == len(cases) <= len(product)
    assert len(pairwise(range(4), range(4), range(4), range(4))) <= 24  # out of 256


def test_cases_that_are_not_allowed_are_left_out(monkeypatch):
    monkeypatch.delenv("TORCHREC_HKV_ALL_CASES", raising=False)

    def allowed(a, b, c):
        return (a, c) != (0, 1) and b != a

    product = [case for case in itertools.product("012", "01", [0, 1]) if allowed(*case)]
    cases = pairwise("012", "01", [0, 1], allowed=allowed)
    assert set(cases) <= set(product)
    assert pairs(cases) == pairs(product)


def test_all_cases_on_request(monkeypatch):
    monkeypatch.setenv("TORCHREC_HKV_ALL_CASES", "1")
    assert pairwise("ab", [1, 2], [3, 4]) == list(itertools.product("ab", [1, 2], [3, 4]))
