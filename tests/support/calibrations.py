"""Calibrations that no device was measured for: constants as a test wants them."""

from __future__ import annotations

from torchrec_hkv.backends.constants import FIXED, Constants, Fit
from torchrec_hkv.planner import Calibration


def calibration(device_type: str = "cpu", **per_id: float) -> Calibration:
    """Milliseconds that an id takes in forward and backward each, by kernel."""
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
