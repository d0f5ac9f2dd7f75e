"""Tests that only a GPU can run, and what they watch there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

#: The ``pytestmark`` of a file.
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def needs_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """The same for one test."""
    for mark in NEEDS_GPU:
        test = mark(test)
    return test


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
