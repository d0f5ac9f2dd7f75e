"""insert_and_evict of a group names the table of each entry that it gives back."""

import torch

from torchrec_hkv.hash_table import MinFrequency, TableGroup, TableSpec


def test_the_tables_of_what_leaves(device_type):
    specs = [
        TableSpec("a", 64, 2),
        TableSpec("b", 64, 3, eviction="customized"),
        TableSpec("c", 64, 1, admission=MinFrequency(2, entries=1 << 14)),
    ]
    group = TableGroup(specs, [0, 1, 2], device=device_type)

    def insert(ids, score):
        """Inserts the same ids into all tables; rows encode id and column."""
        n = len(ids)
        every = torch.tensor(ids * 3, device=device_type)
        offsets = torch.tensor([0, n, 2 * n, 3 * n], device=device_type)
        rows = every[:, None] + torch.tensor([0.0, 0.25, 0.5], device=device_type)
        scores = torch.full_like(every, score)
        return group.insert_and_evict(every, offsets, 1, rows, scores)

    back = insert(list(range(64)), 5)
    assert set(back.tables.tolist()) == {2}  # admits no id
    assert sorted(back.ids.tolist()) == list(range(64))
    back = insert(list(range(64)), 5)
    assert back.ids.numel() == 0
    # The tables are full: LRU evicts, low scores are refused, and so are ids that are not admitted.
    back = insert([100, 101], 4)
    entries = zip(back.tables.tolist(), back.ids.tolist(), back.rows.tolist(), strict=True)
    by_table = {0: [], 1: [], 2: []}
    for table, id_, row in entries:
        dim = specs[table].dim
        assert row == [id_ + 0.25 * c if c < dim else 0.0 for c in range(3)]
        by_table[table].append(id_)
    assert len(by_table[0]) == 2
    assert all(id_ < 64 for id_ in by_table[0])
    assert sorted(by_table[1]) == sorted(by_table[2]) == [100, 101]
    back = insert([100, 101], 6)
    assert sorted(back.tables.tolist()) == [1, 1, 2, 2]
    assert all(id_ < 64 for id_ in back.ids.tolist())
    assert group.sizes() == [64, 64, 64]


def test_a_repeated_id_is_given_back_at_each_position(device_type):
    """A refused id is given back at each of its positions. The highest of its scores in the same
    table decides."""
    specs = [TableSpec(name, 64, 1, eviction="customized") for name in "ab"]
    group = TableGroup(specs, [0, 1], device=device_type)
    full = torch.arange(64, device=device_type).repeat(2)
    offsets = torch.tensor([0, 64, 128], device=device_type)
    ones = torch.ones(128, 1, device=device_type)
    group.insert_or_assign(full, offsets, 1, ones, torch.full_like(full, 5))
    ids = torch.tensor([70, 70, 70], device=device_type)
    offsets = torch.tensor([0, 2, 3], device=device_type)
    scores = torch.tensor([1, 2, 9], device=device_type)
    rows = torch.tensor([[1.0], [2.0], [3.0]], device=device_type)
    back = group.insert_and_evict(ids, offsets, 1, rows, scores)
    given_back = sorted(zip(back.tables.tolist(), back.ids.tolist(), strict=True))
    assert given_back[:2] == [(0, 70), (0, 70)]
    assert given_back[2][0] == 1
    assert given_back[2][1] < 64
    assert group.contains(ids, offsets, 1).tolist() == [False, False, True]
