"""Types of numeric arguments."""

from __future__ import annotations

import argparse
import dataclasses


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """Parses a whole number. If it is too low, argparse prints one sentence.

    Args:
        least: the lowest allowed number.
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
