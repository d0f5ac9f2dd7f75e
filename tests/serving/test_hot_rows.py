"""Which rows of a table larger than a GPU's memory are hot, against numpy; on the CPU."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.served_models import random_batch
from torchrec_hkv import serving
from torchrec_hkv.serving.placement import Placement, carried_counts, numbered_ids, shares
from torchrec_hkv.serving.row_formats import from_bytes, to_bytes
from torchrec_hkv.serving.table_file import build_layer
from torchrec_hkv.serving.tables import ReadOnlyTable, ReadOnlyTables, ServingHotRows

OPS = torch.ops.torchrec_hkv
IDS = torch.arange(70)
SIZES = [1, 31, 32, 33, 64, 1000, 4099]


def largest(counts: Tensor, wanted: int, was_hot: np.ndarray | None = None) -> np.ndarray:
    """Whether each row is among those with the largest counts. For ties, rows that were hot come
    first, then the first rows."""
    was_hot = np.zeros(counts.numel(), dtype=bool) if was_hot is None else was_hot
    order = np.argsort(-(2 * counts.numpy().astype(np.int64) + was_hot), kind="stable")
    is_hot = np.zeros(counts.numel(), dtype=bool)
    is_hot[order[:wanted]] = True
    return is_hot


def drawn(n: int, maximum: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, maximum + 1, (n,), dtype=torch.int32, generator=generator)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("maximum", [0, 1, 40, 1 << 17, 1 << 30])
def test_choice(n, maximum):
    counts = drawn(n, maximum, n)
    counts[n // 2 :: 7] = maximum
    earlier = drawn(n, 3, n + 1)
    previous, was_hot = OPS.serving_choose_hot(earlier, None, n // 3), largest(earlier, n // 3)
    for wanted, again in itertools.product({0, 1, n // 10, n // 2, n - 1, n, n + 5}, (False, True)):
        words = OPS.serving_choose_hot(counts, previous if again else None, wanted)
        words = words.numpy().view(np.uint32)
        is_hot = largest(counts, wanted, was_hot if again else None)
        padded = np.resize(np.append(is_hot, np.zeros(-n % 32, dtype=bool)), (len(words), 32))
        masks = np.packbits(padded, axis=1, bitorder="little").view("<u4")[:, 0]
        before = np.cumsum(padded.sum(1)) - padded.sum(1)
        np.testing.assert_array_equal(words, np.stack([masks, before], 1))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("row_bytes", [4, 36, 512])
def test_copy(n, row_bytes):
    """A row's position follows from its mask and the count before it."""
    counts, wanted = drawn(n, 3, n), n // 3
    rows = drawn(n * row_bytes, 255, n + 1).to(torch.uint8).view(n, row_bytes)
    words = OPS.serving_choose_hot(counts, None, wanted)
    out = torch.empty(wanted, row_bytes, dtype=torch.uint8)
    OPS.serving_copy_hot(words, rows, out)
    assert torch.equal(out, rows[torch.from_numpy(largest(counts, wanted))])


def a_table(ids: Tensor, name: str = "t") -> ReadOnlyTable:
    return ReadOnlyTable(
        name, 2, "fp32", *build_layer(ids, to_bytes(torch.randn(len(ids), 2), "fp32"))
    )


@pytest.mark.parametrize("n", [1, 7, 1000, 60_000])
def test_row_numbers(n):
    """The index gives each id's row number."""
    ids = drawn(2 * n, (1 << 31) - 2, n).long().unique()[:n] * -7919
    erased = torch.arange(len(ids)) % 3 == 1
    index, rows = build_layer(ids, to_bytes(torch.stack([ids, ids], 1).float(), "fp32"), erased)
    values = from_bytes(rows, "fp32", 2)[:, 0]
    found = OPS.serving_row_numbers(index, torch.cat([ids, ids + 1]))
    assert bool((found[len(ids) :] == -1).all())
    assert torch.equal(found[: len(ids)] == -1, erased)
    assert torch.equal(values[found[: len(ids)][~erased]], ids[~erased].float())
    numbered = {}
    for batch, numbers in numbered_ids(index):
        numbered.update(zip(batch.tolist(), numbers.tolist(), strict=True))
    assert sorted(numbered) == ids.tolist()[::-1]
    assert sorted(numbered.values()) == list(range(len(ids)))
    assert [numbered[number] for number in ids[~erased].tolist()] == found[: len(ids)][
        ~erased
    ].tolist()


def test_carried_counts():
    """A new base takes counts over by id. An id that a delta changed has at least the mean of hot
    rows."""
    before = a_table(torch.arange(900))
    counts = drawn(900, 50, 1)
    words = OPS.serving_choose_hot(counts, None, 90)
    hot = ServingHotRows(words, torch.empty(90, 8, dtype=torch.uint8), counts)
    changed, _ = build_layer(torch.arange(0, 2000, 10), torch.empty(200, 8, dtype=torch.uint8))
    before = dataclasses.replace(before, hot=hot, changed_index=changed)
    index = a_table(torch.arange(450, 1500)).index
    got = carried_counts(index, 1050, before)
    numbers = OPS.serving_row_numbers(before.index, torch.arange(900))
    mean = 1 + int(counts.sum()) // 90
    for ids, rows in numbered_ids(index):
        for id_, row in zip(ids.tolist(), rows.tolist(), strict=True):
            want = int(counts[numbers[id_]]) if id_ < 900 else 0
            assert got[row] == (max(want, mean) if id_ % 10 == 0 else want)


def test_opcheck():
    counts, rows = drawn(70, 5, 0), torch.ones(70, 8, dtype=torch.uint8)
    words = OPS.serving_choose_hot(counts, None, 20)
    torch.library.opcheck(OPS.serving_choose_hot, (counts, words, 20))
    torch.library.opcheck(OPS.serving_copy_hot, (words, rows, rows[:20].clone()))
    torch.library.opcheck(OPS.serving_row_numbers, (a_table(IDS).index, IDS))


def test_ops_refuse():
    counts, rows = drawn(70, 5, 0), torch.ones(70, 8, dtype=torch.uint8)
    words = OPS.serving_choose_hot(counts, None, 20)
    with pytest.raises(TypeError, match="counts must be of dtype Int"):
        OPS.serving_choose_hot(counts.long(), None, 20)
    with pytest.raises(ValueError, match="wanted is -1, but must not be negative"):
        OPS.serving_choose_hot(counts, None, -1)
    with pytest.raises(ValueError, match=r"before must be contiguous and of shape \[3, 2\]"):
        OPS.serving_choose_hot(counts, words[:2], 20)
    with pytest.raises(ValueError, match="at most 2\\^32 - 1 rows"):
        OPS.serving_choose_hot(counts, None, 1 << 32)
    with pytest.raises(ValueError, match=r"words must be contiguous and of shape \[3, 2\]"):
        OPS.serving_copy_hot(words[:2], rows, rows[:20].clone())
    with pytest.raises(ValueError, match="out has 19 rows, but 20 are hot"):
        OPS.serving_copy_hot(words, rows, rows[:19].clone())
    with pytest.raises(ValueError, match="device is cpu, but must be a CUDA GPU"):
        OPS.serving_pinned(rows, torch.device("cpu"))
    on_cpu = dataclasses.replace(a_table(IDS), hot=ServingHotRows(words, rows[:20]))
    with pytest.raises(ValueError, match="table 0 has hot rows, but is on cpu"):
        ReadOnlyTables([on_cpu])
    with pytest.raises(ValueError, match=r"index must be contiguous, .* but has shape \[3\]"):
        OPS.serving_row_numbers(IDS[:3], IDS)
    with pytest.raises(TypeError, match="ids must be of dtype Long"):
        OPS.serving_row_numbers(a_table(IDS).index, IDS.int())


def test_shares():
    """Small tables are entirely hot; the others get equal shares."""
    sizes = {"a": 500, "b": 10, "c": 100, "d": 90}
    assert shares(sizes, None) == sizes
    assert shares(sizes, 1000) == sizes
    assert shares(sizes, 700) == sizes
    assert shares(sizes, 300) == {"a": 100, "b": 10, "c": 100, "d": 90}
    assert shares(sizes, 211) == {"a": 67, "b": 10, "c": 67, "d": 67}
    assert shares(sizes, 0) == dict.fromkeys(sizes, 0)
    assert shares(sizes, {"a": 7, "c": 1000}) == {"a": 7, "b": 10, "c": 1000, "d": 90}


def test_arguments():
    names, gpu = ["x.user", "x.item", "y.item"], torch.device("cuda")
    assert Placement.checked(gpu, False, 5, names).hbm_bytes == 5
    by_name = Placement.checked(gpu, False, {"user": 1, "y.item": 0}, names)
    assert by_name.hbm_bytes == {"x.user": 1, "y.item": 0}
    for value in (-1, 2.5, "1 GB", True):
        with pytest.raises(ValueError, match=r"hbm_bytes is .*, but must be a number"):
            Placement.checked(gpu, False, value, names)
    with pytest.raises(ValueError, match="hbm_bytes of table 'user' is -1"):
        Placement.checked(gpu, False, {"user": -1}, names)
    with pytest.raises(ValueError, match="no table 'users'"):
        Placement.checked(gpu, False, {"users": 1}, names)
    with pytest.raises(ValueError, match="2 tables 'item'"):
        Placement.checked(gpu, False, {"item": 1}, names)


def test_cpu(served):
    """A CPU has no HBM to limit, and hot rows are not chosen."""
    with pytest.raises(ValueError, match="hbm_bytes is 0, but device is 'cpu'"):
        serving.load(served[0], hbm_bytes=0)
    model = serving.load(served[0])
    before = model(*random_batch(0))
    model.choose_hot_rows()
    torch.testing.assert_close(model(*random_batch(0)), before, rtol=0, atol=0)
    assert all("host_lookups" not in counts for counts in model.counters().values())
