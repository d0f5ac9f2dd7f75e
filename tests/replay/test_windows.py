"""Distinct ids in windows equal those of Python sets; a regression on them corrects estimates."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.support.sampled_log import groups, places
from torchrec_hkv.replay.sample import GROUPS, Sample, sample_ids
from torchrec_hkv.replay.windows import Windows, corrected

PARTS = (3000, 1, 7000, 0, 5000)
SMALL, LARGE = (500, 2000), (4000, 6000)


def stream(seed=2):
    generator = torch.Generator().manual_seed(seed)
    return (4000 * torch.rand(sum(PARTS), generator=generator) ** 2).long() * 977


def counted(windows, ids):
    begin = 0
    for length in PARTS:
        taken = sample_ids(ids[begin : begin + length], windows.counted, windows.sample)
        windows.update(taken, length)
        begin += length
    return windows


def windows_of(ids, length, starts):
    """The ids of each window. Windows begin at each start, and every so many lookups after it."""
    found, bounds = [], [*starts, ids.numel()]
    for begin, end in itertools.pairwise(bounds):
        found += [ids[at : min(at + length, end)] for at in range(begin, end, length)]
    return found


def test_numbers_are_those_of_sets():
    ids = stream()
    windows = counted(Windows(Sample(0.25), SMALL, LARGE), ids)
    of_groups, of_all = windows.covariates
    starts = [sum(PARTS[:at]) for at, length in enumerate(PARTS) if length]
    expected = [windows_of(ids, length, starts) for length in SMALL]
    expected += [windows_of(ids, length, [0]) for length in LARGE] + [[ids]]
    for of_group, of_each, parts in zip(of_groups, of_all, expected, strict=True):
        counts = np.zeros(GROUPS)
        for part in parts:
            sampled = part.unique().numpy()
            sampled = sampled[places(sampled, windows.sample.rate)]
            counts += np.bincount(groups(sampled), minlength=GROUPS)
        assert of_group.tolist() == counts.tolist()
        distinct = sum(part.unique().numel() for part in parts)
        assert float(of_each) == pytest.approx(distinct, rel=0.02)


def test_misses_that_follow_from_the_numbers_are_exact():
    """A lookup misses if its id was not among the last 2000 lookups of its part."""
    ids = stream()
    for rate in (0.1, 0.3):
        windows = counted(Windows(Sample(rate), SMALL, LARGE), ids)
        misses = windows.covariates[0][1]
        share, error = corrected(misses, windows, ids.numel())
        expected = float(windows.covariates[1][1]) / ids.numel()
        raw = float(misses.sum()) / rate / ids.numel()
        assert share == pytest.approx(expected, abs=0.002)
        assert abs(share - expected) < 0.2 * abs(raw - expected) + 1e-4
        assert error < 0.003


def test_the_error_is_what_samples_differ_by():
    """Random misses of a third of the ids, independent of the numbers of distinct ids."""
    ids = stream().unique().repeat(4)[: sum(PARTS)]
    generator = torch.Generator().manual_seed(1)
    shares, errors = [], []
    for shift in range(40):
        moved = ids + 10**9 * shift  # another sample
        windows = counted(Windows(Sample(0.2), SMALL, LARGE), moved)
        distinct = moved.unique()
        missing = torch.rand(distinct.numel(), generator=generator) < 1 / 3
        ours = places(distinct.numpy(), 0.2)
        misses = torch.bincount(
            torch.from_numpy(groups(distinct[ours].numpy())),
            weights=8.0 * missing[ours],
            minlength=GROUPS,
        )
        share, error = corrected(misses, windows, ids.numel())
        shares.append(share)
        errors.append(error)
    spread = float(torch.tensor(shares).std())
    assert 0.7 * spread < sum(errors) / 40 < 1.4 * spread
