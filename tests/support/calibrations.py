"""Artificial calibrations with constants for tests."""

from __future__ import annotations

from torchrec_hkv.backends.constants import FIXED, Constants, Fit
from torchrec_hkv.planner import Calibration


def calibration(device_type: str = "cpu", **per_id: float) -> Calibration:
    """Creates a calibration. per_id: milliseconds per id in the forward and in the backward, by
    kernel."""
    return Calibration(
        device_type=device_type,
        device="of a test",
        threads=1,
        versions={},
        constants={
            kernel: Constants((Fit(1.0, {"ids": cost, FIXED: 0.25}, {"ids": cost, FIXED: 0.5}),))
            for kernel, cost in per_id.items()
        },
    )
