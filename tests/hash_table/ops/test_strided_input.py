"""Tensors that are not contiguous count like their contiguous copies, or are refused."""

import torch

from tests.support.tables import contents, distinct_ids, make, random_rows


def test_views(device_type):
    ids = distinct_ids(100, device_type)
    counts = torch.arange(100, device=device_type)
    rows = random_rows(make(device_type, dim=8), 100)
    views = {
        "ids": (ids.repeat_interleave(2)[::2], rows, counts),
        "rows by column": (ids, rows.T.contiguous().T, counts),
        "rows of a wider matrix": (ids, torch.cat([rows, rows], 1)[:, 4:12].roll(4, 1), counts),
        "every second row": (ids, rows.repeat_interleave(2, 0)[::2], counts),
        "counts": (ids, rows, counts.repeat_interleave(2)[::2]),
        "one count for all": (ids, rows, counts[5:6].expand(100)),
    }
    for name, (some_ids, some_rows, some_counts) in views.items():
        expected = make(device_type, 200, 8, eviction="lfu")
        expected.insert_or_assign(
            some_ids.contiguous(), some_rows.contiguous(), some_counts.contiguous()
        )
        table = make(device_type, 200, 8, eviction="lfu")
        try:
            table.insert_or_assign(some_ids, some_rows, some_counts)
        except ValueError as error:
            assert "contiguous" in str(error)  # noqa: PT017
            continue
        assert contents(table) == contents(expected), name
        assert torch.equal(table.find(some_ids)[0], some_rows), name
