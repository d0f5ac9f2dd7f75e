"""Random calls on both devices, each compared with the model; tables from one bucket to many."""

import pytest

from tests.support.checked_table import CheckedTable
from tests.support.random_calls import Driver
from tests.support.table_model import POLICIES


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", [7, 64, 100, 200, 1000])
def test_random_calls(device_type, policy, capacity):
    checked = CheckedTable(policy, capacity, device=device_type)
    driver = Driver(checked, policy, capacity, seed=capacity)
    for _ in range(80):
        driver.call()
