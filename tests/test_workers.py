"""Processes of pytest-xdist share the cores; each starts with a GPU of its own."""

import pytest
import torch

from tests.support.workers import share, take_share


@pytest.mark.parametrize(
    ("number", "workers", "cores", "gpus", "threads", "visible"),
    [
        (0, 4, 32, 2, "8", "0,1"),
        (3, 4, 32, 2, "8", "1,0"),
        (5, 28, 32, 4, "1", "1,2,3,0"),
        (1, 8, 2, 1, "1", "0"),
    ],
)
def test_share(number, workers, cores, gpus, threads, visible):
    assert share(number, workers, cores, gpus) == {
        "OMP_NUM_THREADS": threads,
        "CUDA_VISIBLE_DEVICES": visible,
    }


def test_without_a_gpu():
    assert share(0, 2, 2, 0) == {"OMP_NUM_THREADS": "1"}


def test_what_somebody_has_set_stays():
    threads = torch.get_num_threads()
    environment = {
        "PYTEST_XDIST_WORKER": "gw1",
        "PYTEST_XDIST_WORKER_COUNT": "2",
        "OMP_NUM_THREADS": str(threads + 1),
        "CUDA_VISIBLE_DEVICES": "",
    }
    wanted = dict(environment)
    take_share(environment)
    assert environment == wanted
    assert torch.get_num_threads() == threads


def test_no_worker():
    environment = {}
    take_share(environment)
    assert environment == {}
