"""Counters of a table."""

from tests.support.tables import distinct_ids, make, random_rows


def test_find_or_insert(device_type):
    table = make(device_type, 64)
    ids = distinct_ids(200, device_type)
    table.find_or_insert(ids[:64])
    table.find_or_insert(ids[:30])
    table.find(ids)
    table.find_or_insert(ids[64:84])
    table.find_or_insert(ids[100:200])
    assert table.counters() == {
        "lookups": 214,
        "hits": 30,
        "inserted": 148,
        "evicted": 84,
        "refused": 36,
        "unadmitted": 0,
        "expired": 0,
        "fetched": 0,
        "written_back": 0,
        "host_hits": 30 if device_type == "cpu" else 0,
        "returned": 0,
        "size": 64,
        "capacity": 64,
    }


def test_insertions(device_type):
    table = make(device_type, 64)
    ids = distinct_ids(100, device_type)
    table.insert_or_assign(ids[:60], random_rows(table, 60))
    table.insert_or_assign(ids[50:70], random_rows(table, 20))
    table.insert_and_evict(ids[70:], random_rows(table, 30))
    counters = table.counters()
    assert counters["inserted"] == 100
    assert counters["evicted"] == 36
    assert counters["refused"] == 0


def test_changes_of_what_is_there_do_not_insert(device_type):
    table = make(device_type, 64)
    ids = distinct_ids(40, device_type)
    table.find_or_insert(ids[:20])
    table.assign(ids, random_rows(table, 40))
    table.assign_rows(ids, random_rows(table, 40))
    table.assign_scores(ids)
    table.erase(ids)
    counters = table.counters()
    assert counters["inserted"] == 20
    assert counters["evicted"] == counters["refused"] == counters["size"] == 0
