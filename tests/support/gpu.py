"""Marks for tests that need a GPU, and a check for waits."""

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
    """Marks one test."""
    for mark in NEEDS_GPU:
        test = mark(test)
    return test


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """A context in which operations that make the host wait for the device raise an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
