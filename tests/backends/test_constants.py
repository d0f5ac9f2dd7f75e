"""Constants fitted to measured steps are not negative, and predict later steps."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from torchrec_hkv.backends.constants import (
    FIXED,
    Constants,
    Fit,
    TimedStep,
    fit_constants,
    fit_works,
)
from torchrec_hkv.backends.workload import StepTime, Work

_FORWARD = {"ids": 2e-5, "bytes": 3e-7, "unused": 0.0}
_BACKWARD = {"ids": 5e-5, "bytes": 1e-7, "unused": 2e-6}


def _samples(size, scale, fixed=(0.05, 0.2), count=12):
    generator = torch.Generator().manual_seed(int(size))
    samples = []
    for _ in range(count):
        work = {name: float(torch.rand((), generator=generator) * 1e6) for name in _FORWARD}
        forward = fixed[0] + scale * sum(_FORWARD[name] * work[name] for name in work)
        backward = fixed[1] + scale * sum(_BACKWARD[name] * work[name] for name in work)
        samples.append(TimedStep(Work(work, work), StepTime(forward, backward), size))
    return samples


def test_constants_that_made_the_times_are_found():
    (fit,) = fit_constants(_samples(100.0, 1.0)).fits
    for found, true, fixed in ((fit.forward, _FORWARD, 0.05), (fit.backward, _BACKWARD, 0.2)):
        assert found[FIXED] == pytest.approx(fixed, rel=1e-6)
        for name, value in true.items():
            assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-12)


def test_no_constant_is_negative_and_none_is_better():
    generator = torch.Generator().manual_seed(3)
    samples = [
        TimedStep(Work(work, work), StepTime(elapsed, elapsed), 1.0)
        for _ in range(20)
        for elapsed in [float(torch.rand((), generator=generator)) + 0.1]
        for work in [{"a": float(torch.rand((), generator=generator)), "b": 2.0 - elapsed}]
    ]
    (fit,) = fit_constants(samples).fits
    assert min(fit.forward.values()) >= 0

    def error(constants):
        return sum(
            (
                (constants[FIXED] + sum(constants[n] * c for n, c in s.work.forward.items()))
                / s.time.forward
                - 1
            )
            ** 2
            for s in samples
        )

    minimum = error(fit.forward)
    for _ in range(2000):
        steps = torch.randn(3, generator=generator).tolist()
        other = {
            name: max(value + 0.01 * step, 0.0)
            for (name, value), step in zip(fit.forward.items(), steps, strict=True)
        }
        assert error(other) >= minimum * (1 - 1e-9)


def test_between_two_sizes_the_logarithm_counts():
    constants = fit_constants([*_samples(1e4, 1.0), *_samples(1e8, 3.0)])
    work = Work({"ids": 1e5, "bytes": 0.0, "unused": 0.0}, {"ids": 1e5})
    at = {size: constants.time(work, size).forward for size in (1.0, 1e4, 1e6, 1e8, 1e12)}
    assert at[1.0] == at[1e4] == pytest.approx(2.0)
    assert at[1e12] == at[1e8] == pytest.approx(6.0)
    assert at[1e6] == pytest.approx(4.0)
    assert constants.group_time.backward == pytest.approx(0.2)


def test_the_file_has_all_of_it():
    constants = fit_constants([*_samples(1e4, 1.0), *_samples(1e8, 3.0)])
    assert Constants.from_json(json.loads(json.dumps(constants.to_json()))) == constants


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        [{"table_bytes": 1}],
        [{"table_bytes": 0, "forward": {}, "backward": {}}],
        [{"table_bytes": 1, "forward": {"ids": -1}, "backward": {}}],
        [{"table_bytes": 1, "forward": {"ids": float("nan")}, "backward": {}}],
    ],
)
def test_what_is_no_list_of_constants_is_refused(content):
    with pytest.raises(ValueError, match=r"^The content: .*must be"):
        Constants.from_json(content)


def test_a_fit_is_what_it_was_made_of():
    fit = Fit(4.0, {"ids": 2.0, FIXED: 7.0}, {"ids": 3.0, FIXED: 9.0})
    elapsed = Constants((fit,)).time(Work({"ids": 10.0, "other": 5.0}, {"ids": 1.0}), 99.0)
    assert (elapsed.forward, elapsed.backward) == (20.0, 3.0)


def test_the_best_of_all_sets_of_constants():
    """The fit finds the set of constants that an exhaustive search finds, also for collinear
    counts."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(20):
        counts = torch.rand(9, 4, generator=generator, dtype=torch.float64)
        counts[:, 3] = 2 * counts[:, 0] + 1e-3 * counts[:, 1]
        elapsed = torch.rand(9, generator=generator, dtype=torch.float64) + 0.2
        names = "abcd"
        found = fit_works(
            [dict(zip(names, row.tolist(), strict=True)) for row in counts], elapsed.tolist()
        )
        columns = torch.cat([counts, torch.ones(9, 1)], dim=1) / elapsed[:, None]
        values = torch.tensor([found[name] for name in (*names, FIXED)], dtype=torch.float64)
        error = float((columns @ values - 1).square().sum())
        errors = []
        for number in range(1, 6):
            for chosen in itertools.combinations(range(5), number):
                own = columns[:, chosen]
                solution = torch.linalg.lstsq(
                    own, torch.ones(9, 1).double(), driver="gelsd"
                ).solution
                if (solution >= 0).all():
                    errors.append(float((own @ solution - 1).square().sum()))
        assert min(values) >= 0
        assert error == pytest.approx(min(errors), rel=1e-6)
