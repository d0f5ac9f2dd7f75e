"""A strict table raises if an id gets no slot, and only then."""

import pytest
import torch

from tests.support.table_model import POLICIES
from tests.support.tables import constant_scores, contents, distinct_ids, make, random_rows
from torchrec_hkv.hash_table import MinFrequency, Probability

SENTENCE = (
    r"^Table 'table' is strict and had no place for 36 of this call's new ids: both buckets of "
    r"each are full .* Its load is 1\.000 \(64 of 64 slots\): give it a larger capacity, use "
    r"smaller batches, or keep fewer of them in flight\.$"
)


def overfill(table, call: str, ids: torch.Tensor) -> None:
    scores = constant_scores(table, len(ids))
    if call == "find_or_insert":
        table.find_or_insert(ids, scores)
    elif call == "find_or_insert_slots":
        table.find_or_insert_slots(ids, scores)
    elif call == "insert_or_assign":
        table.insert_or_assign(ids, random_rows(table, len(ids)), scores)
    else:
        nowhere = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        table.accum_or_assign(ids, random_rows(table, len(ids)), nowhere, scores)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "call", ["find_or_insert", "find_or_insert_slots", "insert_or_assign", "accum_or_assign"]
)
def test_raises_and_goes_on(device_type, policy, call):
    table = make(device_type, 64, eviction=policy, strict=True)
    ids = distinct_ids(300, device_type)
    overfill(table, call, ids[:64])
    for first in (100, 200):
        with pytest.raises(RuntimeError, match=SENTENCE):
            overfill(table, call, ids[first : first + 100])
        overfill(table, call, ids[:64])  # the next call does not raise again
    counters = table.counters()
    assert counters["refused"] == 72
    assert counters["inserted"] == 64 * 5


def test_the_other_ids_have_been_placed_with_their_rows(device_type):
    table = make(device_type, 64, strict=True)
    ids = distinct_ids(100, device_type)
    rows = random_rows(table, 100)
    with pytest.raises(RuntimeError, match=SENTENCE):
        table.insert_or_assign(ids, rows)
    given = dict(zip(ids.tolist(), map(tuple, rows.tolist()), strict=True))
    held = contents(table)
    assert len(held) == 64
    assert all(row == given[id_] for id_, (row, _, _) in held.items())


def test_others_do_not_raise(device_type):
    table = make(device_type, 64)
    overfill(table, "find_or_insert", distinct_ids(100, device_type))
    assert table.counters()["refused"] == 36


def test_a_low_score_does_not_raise(device_type):
    table = make(device_type, 64, eviction="customized", strict=True)
    ids = distinct_ids(100, device_type)
    table.find_or_insert(ids[:64], torch.full((64,), 5, device=device_type))
    table.find_or_insert(ids[64:], torch.full((36,), 4, device=device_type))
    assert table.counters()["refused"] == 36


@pytest.mark.parametrize(
    "admission", [MinFrequency(2, entries=64), Probability(1e-9)], ids=["counted", "drawn"]
)
def test_an_unadmitted_id_does_not_raise(device_type, admission):
    table = make(device_type, 64, admission=admission, strict=True)
    overfill(table, "find_or_insert", distinct_ids(100, device_type))
    assert table.counters()["unadmitted"] == 100


def test_insert_and_evict_gives_back_instead(device_type):
    table = make(device_type, 64, strict=True)
    ids = distinct_ids(100, device_type)
    back = table.insert_and_evict(ids, random_rows(table, 100))
    assert back.ids.numel() == 36
    table.find_or_insert(ids[:1])
    assert table.counters()["refused"] == 36


def test_repeated_ids(device_type):
    """A call raises for a refused id at several positions, whatever the number it names."""
    table = make(device_type, 64, strict=True)
    ids = distinct_ids(65, device_type)
    with pytest.raises(RuntimeError, match=r"had no place for \d+ of this call's new ids"):
        table.find_or_insert(torch.cat([ids[:64], ids[64:].expand(500)]))
    assert table.counters()["refused"] >= 1


def test_neither_true_nor_false():
    with pytest.raises(ValueError, match=r"table 'table': strict is 1, but must be True or False"):
        make("cpu", strict=1)
