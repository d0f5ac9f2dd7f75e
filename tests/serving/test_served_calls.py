"""Calls of a served model: their mode, timings and input checks."""

from __future__ import annotations

import pytest
import torch

from torchrec_hkv import _C


def test_mode_and_result():
    calls = _C.ServedCalls([1.0])

    def body(a, b):
        assert torch.is_inference_mode_enabled()
        return a, b

    assert calls.call(body, (1, "two")) == (1, "two")
    assert not torch.is_inference_mode_enabled()


def test_times():
    bounds = [1e-9, 60.0]
    calls = _C.ServedCalls(bounds)
    for _ in range(5):
        calls.call(sum, ([1, 2],))
    counts, seconds = calls.histogram()
    assert counts == [0, 5, 0]
    assert 0 < seconds < 60


def test_errors_are_not_counted():
    calls = _C.ServedCalls([60.0])
    with pytest.raises(ZeroDivisionError):
        calls.call(lambda x: 1 / x, (0,))
    assert not torch.is_inference_mode_enabled()
    assert calls.histogram() == ([0, 0], 0.0)


def test_inputs():
    checks = _C.InputChecks([("a", torch.int64, ["s", 3]), ("b", torch.float32, ["s"])])
    a, b = torch.zeros(5, 3, dtype=torch.int64), torch.zeros(5)
    checks.check([a, b])
    checks.check([a[:0], b[:0]])
    for given, kind, message in (
        ([a], ValueError, "takes 2 tensors, but is given 1"),
        ([a, 5], TypeError, "b must be a tensor"),
        ([a, b.half()], TypeError, "b is of dtype torch.float16, but must be of torch.float32"),
        ([a[:, :2], b], ValueError, r"a has shape \(5, 2\), but must have shape \[\*, 3\]"),
        ([a, b[:, None]], ValueError, r"b has shape \(5, 1\), but must have shape \[\*\]"),
        ([a, b[1:]], ValueError, "a and b don't fit: the sizes 5 and 4 must be equal"),
    ):
        with pytest.raises(kind, match=message):
            checks.check(given)
