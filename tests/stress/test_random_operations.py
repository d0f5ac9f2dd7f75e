"""Millions of random operations on one table after another, each call compared with the model.

An operation is one id in one call: a find, insertion, assignment, accumulation or erasure of that
id. After every call, the whole table is compared with the model. Environment variables:

    TORCHREC_HKV_STRESS: total operations on each device; if unset, these tests are skipped.
    TORCHREC_HKV_STRESS_SEED: seed of the calls; 1 by default.
    TORCHREC_HKV_STRESS_SECONDS: time limit for a device's tests, which then report the operations
        not run, and fail. No limit by default.

With pytest's ``-s``, progress is printed.
"""

import itertools
import os
import time

import pytest
import torch

from tests.support.checked_table import CheckedTable
from tests.support.random_calls import CALLS, Driver
from tests.support.table_model import POLICIES
from torchrec_hkv.hash_table import Constant, Uniform

# One bucket, two, two unequally filled, and many. The model predicts evictions for the first three.
CAPACITIES = [7, 64, 100, 1000, 6000]
CASES = list(itertools.product(POLICIES, CAPACITIES))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(
    "TORCHREC_HKV_STRESS" not in os.environ,
    reason="a long run: TORCHREC_HKV_STRESS says how many operations",
)
@pytest.mark.parametrize(("policy", "capacity"), CASES)
def test_random_operations(device_type, policy, capacity, tmp_path):
    wanted = -(-int(os.environ["TORCHREC_HKV_STRESS"]) // len(CASES))
    seed = int(os.environ.get("TORCHREC_HKV_STRESS_SEED", "1"))
    limit_s = float(os.environ.get("TORCHREC_HKV_STRESS_SECONDS", "inf")) / len(CASES)
    checked = CheckedTable(
        policy,
        capacity,
        device=device_type,
        dtype=DTYPES[(seed + capacity) % 3],
        initializer=Constant(0.25) if seed % 4 == 0 else Uniform(-1, 1),
    )
    # Calls are large, since the comparison after each takes time in proportion to the table.
    calls = [*CALLS, *CALLS, *CALLS, "clear", "reload"]
    driver = Driver(checked, policy, capacity, seed, batch=2 * capacity, calls=calls)
    driver.folder = tmp_path / "table"
    begin = reported_at = time.monotonic()
    while driver.operations < wanted:
        try:
            driver.call()
        except Exception as error:
            raise AssertionError(
                f"seed {seed}, policy {policy}, capacity {capacity}, {device_type}: "
                f"call {driver.number}, after {driver.operations} operations"
            ) from error
        now = time.monotonic()
        if now - begin > limit_s:
            pytest.fail(f"only {driver.operations} of {wanted} operations in {limit_s:.0f} s")
        if now - reported_at > 10:
            reported_at = now
            print(f"{policy}, {capacity}: {driver.operations} of {wanted} operations", flush=True)
    print(
        f"{policy}, {capacity}: {driver.operations} operations in {driver.number} calls, "
        f"{time.monotonic() - begin:.1f} s",
        flush=True,
    )
