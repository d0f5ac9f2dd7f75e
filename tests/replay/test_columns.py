"""Columns that share a table give ids ordered by step, then by column, as Python loops do."""

from __future__ import annotations

import pytest
import torch

from torchrec_hkv.replay.log import Ids, Part
from torchrec_hkv.replay.sample import Sample
from torchrec_hkv.replay.step_splitter import StepSplitter


def column(generator, num_samples, kind):
    if kind == "one":
        return Ids(torch.randint(1000, (num_samples,), generator=generator))
    maximum = 3 if kind == "several" else 1
    lengths = torch.randint(0, maximum + 1, (num_samples,), generator=generator)
    samples = torch.repeat_interleave(torch.arange(num_samples), lengths)
    return Ids(torch.randint(1000, (len(samples),), generator=generator), samples)


@pytest.mark.parametrize("batch_size", [1, 7, 64, 10_000])
@pytest.mark.parametrize(
    "kinds", [("one",), ("several",), ("one", "several", "none"), ("one", "one")]
)
def test_steps(batch_size, kinds):
    generator = torch.Generator().manual_seed(batch_size)
    names = [str(at) for at in range(len(kinds))]
    splitter = StepSplitter(names, Sample(), batch_size)
    steps, expected, samples = [], {}, 0
    for num_samples in (100, 1, 0, 250, 13):
        columns = {
            name: column(generator, num_samples, kind)
            for name, kind in zip(names, kinds, strict=True)
        }
        for sample in range(num_samples):  # opens every step
            expected.setdefault((samples + sample) // batch_size, [])
        for ids in columns.values():
            own = torch.arange(len(ids.values)) if ids.samples is None else ids.samples
            for sample, ident in zip(own.tolist(), ids.values.tolist(), strict=True):
                expected[(samples + sample) // batch_size].append(ident)
        samples += num_samples
        steps.append(splitter.steps(Part(num_samples, columns)))
    steps.append(splitter.last())
    assert splitter.lookups == sum(map(len, expected.values()))
    found = {}
    for part in steps:
        if part.ends.numel():
            split = part.ids.tensor_split(part.ends[:-1])
            found |= {number: ids.tolist() for number, ids in enumerate(split, part.first)}
    last = samples // batch_size
    assert found.pop(last, []) == expected.pop(last, [])
    assert found == expected
