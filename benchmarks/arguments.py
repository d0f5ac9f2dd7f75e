"""Types of numbers that benchmarks are given."""

from __future__ import annotations

import argparse
import dataclasses


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """A whole number, which argparse refuses in one sentence if it is too low.

    Args:
        least: the lowest that is accepted.
    """

    least: int

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < self.least:
            raise argparse.ArgumentTypeError(f"{value} is less than {self.least}")
        return value
