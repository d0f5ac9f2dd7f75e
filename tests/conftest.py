"""Fixtures for the tests of all layers."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.ranks import Ranks
from tests.support.workers import take_share

take_share(os.environ)
# A calibration file of this machine would change plans.
os.environ["TORCHREC_HKV_CALIBRATION"] = ""

_GROUPS: dict[tuple[int, str, int], Ranks] = {}
_RESULTS: dict[tuple[Any, ...], list[Any]] = {}


def pytest_collection_finish() -> None:
    """Excludes imported modules from garbage collection, which otherwise takes .5 s each time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Appends each failure to the file ``TORCHREC_HKV_FAILURES`` as soon as it occurs.

    A run that is ended by a time limit prints no failures.
    """
    path = os.environ.get("TORCHREC_HKV_FAILURES")
    if not path or not report.failed or "PYTEST_XDIST_WORKER" in os.environ:
        return
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{report.when} of {report.nodeid}\n{report.longreprtext}\n\n")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device_type(request: pytest.FixtureRequest) -> str:
    """The device a test runs on: ``"cpu"``, and ``"cuda"`` where there is a GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return request.param


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """``torch.set_num_threads``; restores the number after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def run_ranks(device_type: str) -> Callable[..., list[Any]]:
    """``run_ranks(world_size, function, *args)``: see :meth:`tests.support.ranks.Ranks.run`.

    ``host_size`` is the number of ranks that TorchRec takes for one host; all of them by default.
    """

    def run(
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        host_size: int | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        if device_type == "cuda" and torch.cuda.device_count() < world_size:
            pytest.skip(f"needs {world_size} GPUs")
        key = (world_size, device_type, host_size or world_size)
        if key not in _GROUPS or not _GROUPS[key].is_alive:
            _GROUPS[key] = Ranks(world_size, device_type, host_size)
        return _GROUPS[key].run(function, *args, **kwargs)

    return run


@pytest.fixture
def run_ranks_once(
    run_ranks: Callable[..., list[Any]], device_type: str
) -> Callable[..., list[Any]]:
    """Like ``run_ranks``, but caches results that are equal each time, for several tests to compare
    with."""

    def run(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        key = (device_type, world_size, function, args)
        if key not in _RESULTS:
            _RESULTS[key] = run_ranks(world_size, function, *args)
        return _RESULTS[key]

    return run


@pytest.fixture(scope="session", autouse=True)
def _end_ranks() -> Iterator[None]:
    yield
    for ranks in _GROUPS.values():
        ranks.end()
