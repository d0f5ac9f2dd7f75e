"""The result of a verb."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class CommandResult:
    """A result as text and as JSON.

    Attributes:
        text: text to print.
        content: what ``--json`` prints.
        code: exit code.
    """

    text: str
    content: dict[str, Any]
    code: int = 0
