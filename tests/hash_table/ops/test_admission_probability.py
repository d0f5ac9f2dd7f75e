"""Each missing id is admitted with a given probability; the draw depends on table, id and call."""

import pytest
import torch

from tests.support.admission_model import DrawnIds
from tests.support.tables import distinct_ids, make
from torchrec_hkv.hash_table import Probability


@pytest.mark.parametrize("p", [0.03, 0.5, 0.97])
def test_as_the_documented_formula_draws(device_type, p):
    table = make(device_type, 2048, admission=Probability(p), name="user", seed=-7)
    model, inside = DrawnIds(p, "user", -7), set()
    pool = distinct_ids(500, device_type)
    for call in range(1, 8):
        ids = pool[torch.randint(0, 500, (400,))]
        slots, _ = table.find_or_insert_slots(ids)
        model.begin_call(call)
        inside |= model.admitted([id_ for id_ in ids.tolist() if id_ not in inside])
        assert (slots >= 0).tolist() == [id_ in inside for id_ in ids.tolist()]
    assert table.size == len(inside)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9])
def test_share_of_ids(device_type, p):
    n = 100_000
    table = make(device_type, 2 * n, admission=Probability(p))
    slots, _ = table.find_or_insert_slots(torch.arange(n, device=device_type))
    share = float((slots >= 0).double().mean())
    deviation = (p * (1 - p) / n) ** 0.5
    assert abs(share - p) < 5 * deviation
    assert table.counters()["unadmitted"] == n - table.size


def test_draws_of_ids_and_calls_are_independent(device_type):
    """Each of three calls admits the same share of the ids that the previous ones rejected."""
    n, p = 50_000, 0.5
    table = make(device_type, 2 * n, admission=Probability(p))
    ids = torch.arange(n, device=device_type)
    left = n
    for _ in range(4):
        before = table.size
        table.find_or_insert(ids)
        assert abs((table.size - before) / left - p) < 5 * (p * (1 - p) / left) ** 0.5
        left = n - table.size


def test_one_draw_for_all_occurrences_of_an_id(device_type):
    table = make(device_type, 2048, admission=Probability(0.5))
    ids = distinct_ids(300, device_type).repeat(7)
    ids = ids[torch.randperm(2100, device=device_type)]
    slots, _ = table.find_or_insert_slots(ids)
    fates = {}
    for id_, slot in zip(ids.tolist(), slots.tolist(), strict=True):
        assert fates.setdefault(id_, slot) == slot
    assert 100 < sum(slot >= 0 for slot in fates.values()) < 200


def test_other_tables_draw_otherwise(device_type):
    ids = distinct_ids(1000, device_type)
    admitted = [
        make(device_type, 4096, admission=Probability(0.5), **options).find_or_insert_slots(ids)[0]
        >= 0
        for options in ({}, {}, {"seed": 1}, {"name": "other"})
    ]
    assert torch.equal(admitted[0], admitted[1])
    for other in admitted[2:]:
        assert 400 < int((admitted[0] == other).sum()) < 600


def test_probability_of_one_admits_all(device_type):
    table = make(device_type, 4096, admission=Probability(1.0))
    assert (table.find_or_insert_slots(distinct_ids(3000, device_type))[0] >= 0).all()
    assert table.counters()["unadmitted"] == 0
