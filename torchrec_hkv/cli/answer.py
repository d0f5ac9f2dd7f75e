"""What a verb gives back."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer, for people and for programs.

    Attributes:
        text: for people.
        content: what ``--json`` prints.
        code: the exit code.
    """

    text: str
    content: dict[str, Any]
    code: int = 0
