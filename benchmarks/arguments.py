"""Types of numeric arguments."""

from __future__ import annotations

import argparse
import dataclasses


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """Parses a whole number. If it is too low, argparse prints one sentence.

    Args:
        minimum: the lowest allowed number.
    """

    minimum: int

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < self.minimum:
            raise argparse.ArgumentTypeError(f"{value} is less than {self.minimum}")
        return value
