"""If all cells of an id are taken, it replaces the lowest count. No id is admitted too early, and
frequent ids are admitted."""

import collections

import pytest
import torch

from tests.support.admission_model import CountedIds
from tests.support.tables import distinct_ids, make
from torchrec_hkv.hash_table import MinFrequency


@pytest.mark.parametrize("entries", [1, 8, 40, 200])
def test_never_too_early(device_type, entries):
    """With ten times as many ids as entries, ids may be admitted late but not early."""
    table = make(device_type, 4096, admission=MinFrequency(3, entries=entries))
    pool = distinct_ids(10 * max(8, entries), device_type)
    requested: collections.Counter[int] = collections.Counter()
    for _ in range(30):
        ids = pool[torch.randint(0, len(pool), (len(pool) // 2,))]
        requested.update(ids.tolist())
        slots, _ = table.find_or_insert_slots(ids)
        there = set(ids[slots >= 0].tolist())
        assert there <= {id_ for id_, times in requested.items() if times >= 3}
        in_this_call = collections.Counter(ids.tolist())
        assert there >= {id_ for id_, times in in_this_call.items() if times >= 3}
    assert table.size > 0


def test_one_id_of_a_call_in_full_cells(device_type):
    """With one new id a call, order does not matter: both devices agree with the model."""
    admission = MinFrequency(4, entries=8)
    table, model = make(device_type, 512, admission=admission), CountedIds(admission)
    pool = distinct_ids(14, device_type).tolist()
    generator = torch.Generator().manual_seed(0)
    admitted = set()
    for call in range(1, 400):
        id_ = pool[int(14 * torch.rand((), generator=generator) ** 2)]
        slots, found = table.find_or_insert_slots(torch.tensor([id_], device=device_type))
        assert bool(found) == (id_ in admitted)
        model.begin_call(call)
        if not found:
            admitted |= model.admitted([id_])
        assert (int(slots) >= 0) == (id_ in admitted)
    assert len(admitted) >= 6
    assert model.forgotten > 0


def test_more_new_ids_in_a_call_than_cells(device_type):
    """Ids of the present call keep their cells; others lose them and restart from zero."""
    table = make(device_type, 512, admission=MinFrequency(2, entries=8))
    ids = distinct_ids(100, device_type)
    table.find_or_insert(ids)
    slots, _ = table.find_or_insert_slots(ids)
    assert 1 <= (slots >= 0).sum() <= 8
    assert table.counters()["unadmitted"] == 200 - table.size


def test_what_a_call_has_counted_is_not_replaced_in_it():
    """On a CPU the first ids of a call get the cells, and later ids do not replace them."""
    table = make("cpu", 512, admission=MinFrequency(3, entries=8))
    ids = distinct_ids(20, "cpu")
    table.find_or_insert(torch.cat([ids[:8].repeat(2), ids[8:]]))
    slots, _ = table.find_or_insert_slots(ids)
    assert (slots >= 0).tolist() == [True] * 8 + [False] * 12


def test_the_lowest_count_makes_room(device_type):
    table = make(device_type, 512, admission=MinFrequency(10, entries=8))
    ids = distinct_ids(9, device_type)
    table.find_or_insert(ids[:8].repeat(5))
    table.find_or_insert(ids[1:8])  # five occurrences of the first, six of the others
    table.find_or_insert(ids[8:].repeat(9))  # replaces the first
    slots, _ = table.find_or_insert_slots(torch.cat([ids[1:], ids[1:8].repeat(3)]))
    assert (slots >= 0).all()
    slots, _ = table.find_or_insert_slots(ids[:1].repeat(9))
    assert (slots == -1).all()


def test_a_cell_is_free_once_its_id_is_admitted(device_type):
    table = make(device_type, 512, admission=MinFrequency(2, entries=8))
    for part in distinct_ids(80, device_type).split(8):
        assert (table.find_or_insert_slots(part)[0] == -1).all()
        assert (table.find_or_insert_slots(part)[0] >= 0).all()


def test_same_answer_whatever_the_number_of_threads():
    threads = torch.get_num_threads()
    ids = distinct_ids(3000, "cpu")[torch.randint(0, 3000, (40, 2000))]
    results = []
    for number in (1, 2, 4):
        torch.set_num_threads(number)
        table = make("cpu", 2000, admission=MinFrequency(3, entries=500))
        results.append(torch.stack([table.find_or_insert_slots(part)[0] for part in ids]))
    torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert (results[0] == -1).any()
    assert (results[0] >= 0).any()
