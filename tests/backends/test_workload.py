"""Expected values of a step, from histograms of ids, agree with those of drawn steps."""

from __future__ import annotations

import pytest
import torch

from torchrec_hkv.backends.workload import IdFrequencies, Workload, row_work


def _skewed(count, generator):
    return (2000 * torch.rand(count, generator=generator) ** 3).long() - 7


@pytest.fixture(scope="module")
def generator():
    return torch.Generator().manual_seed(9)


def test_a_sample_is_counted(generator):
    ids = _skewed(50_000, generator)
    frequencies = IdFrequencies.of_ids(ids.view(100, 500))
    distinct, counts = ids.unique(return_counts=True)
    assert frequencies.num_ids == distinct.numel()
    assert frequencies.lookups == pytest.approx(ids.numel())
    assert (frequencies.lowest, frequencies.highest) == (int(ids.min()), int(ids.max()))
    for rows in (1, 10, 500, 10**6):
        share = float(counts.sort(descending=True)[0][:rows].sum()) / ids.numel()
        assert frequencies.share_of(rows) == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize("lookups", [1, 100, 10_000, 200_000])
def test_different_ids_of_a_step(generator, lookups):
    counts = torch.rand(3000, generator=generator).pow(4).mul(1000).long()
    frequencies = IdFrequencies.of_counts(counts)
    drawn = torch.multinomial(
        counts.double(), lookups, replacement=True, generator=generator
    ).unique()
    assert frequencies.distinct(lookups) == pytest.approx(drawn.numel(), rel=0.05, abs=2)
    top = counts.argsort(descending=True)[:200]
    beyond = int((~torch.isin(drawn, top)).sum())
    assert frequencies.distinct(lookups, beyond=200) == pytest.approx(beyond, rel=0.08, abs=3)


def test_a_long_histogram_is_short():
    frequencies = IdFrequencies.of_counts(torch.arange(1, 200_000))
    assert len(frequencies.histogram) < 1500
    assert frequencies.num_ids == 199_999
    assert hash(frequencies) == hash(IdFrequencies.of_counts(torch.arange(1, 200_000)))


def test_one_id():
    frequencies = IdFrequencies.of_ids(torch.tensor([5, 5]))
    assert frequencies.distinct(10) == 1.0
    assert frequencies.distinct(10, beyond=1) == 0.0
    assert frequencies.share_of(1) == 1.0


@pytest.mark.parametrize("histogram", [(), ((0, 1.0),), ((1, 0.0),), ((1, float("inf")),)])
def test_impossible_histograms_are_refused(histogram):
    with pytest.raises(ValueError, match="IdFrequencies: the histogram"):
        IdFrequencies(histogram)


def test_nothing_to_count_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        IdFrequencies.of_ids(torch.empty(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="must have an id"):
        IdFrequencies.of_counts([0, 0])


def test_ids_beyond_rows_that_are_near():
    counts = [100] * 10 + [1] * 990
    frequencies = IdFrequencies.of_counts(counts)
    # Two ranks share the table: this one gets 400 ids of a step.
    load = Workload(400, frequencies.distinct(800) / 2, 400, frequencies, share=0.5)
    assert load.distinct_beyond(5, 500) == pytest.approx(frequencies.distinct(800, 10) / 2)
    assert load.distinct_beyond(500, 500) == 0
    alike = Workload(400, 300, 400)
    assert alike.distinct_beyond(125, 500) == 225


def test_work_of_tables_of_rows():
    work = row_work(Workload(ids=80, distinct=50, bags=10), dim=16, row_bytes=68)
    assert work.forward == {
        "ids": 80,
        "id_bytes": 80 * 64,
        "bag_bytes": 10 * 64,
        "distinct": 50,
        "row_bytes": 50 * 64,
    }
    assert work.backward == {**work.forward, "row_bytes": 50 * 68}
