"""Fenced code blocks of Markdown pages, with marks that define how tests run them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[a-z ]+): (?P<value>.+?) -->\n+)?"
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
#: A directive of MyST, such as ``{toctree}``, which is not run.
DIRECTIVE = re.compile(r"^```\{.*?^```$", re.MULTILINE | re.DOTALL)
MARKS = ("run", "not run", "needs")


@dataclasses.dataclass(frozen=True)
class CodeBlock:
    """A code block.

    Attributes:
        page: file of the page.
        line: line of the page where the code begins.
        language: language after the opening fence; "" for none.
        code: code without the fences.
        mark: mark in the comment above it: ``"run"``, ``"not run"``, ``"needs"``; "" for none.
        value: value of the mark: a launcher, a reason, a package or ``no GPU``.
    """

    page: Path
    line: int
    language: str
    code: str
    mark: str = ""
    value: str = ""


def code_blocks(page: Path) -> list[CodeBlock]:
    """Returns the fenced blocks of a page, in order, without directives of MyST.

    Raises:
        ValueError: a mark is unknown.
    """
    text = DIRECTIVE.sub(lambda found: "\n" * found[0].count("\n"), page.read_text())
    blocks = []
    for found in BLOCK.finditer(text):
        mark = found["mark"] or ""
        line = text.count("\n", 0, found.start("code")) + 1
        if mark and mark not in MARKS:
            raise ValueError(f"{page.name}:{line}: the mark is {mark!r}, but must be in {MARKS}.")
        blocks.append(
            CodeBlock(page, line, found["language"], found["code"], mark, found["value"] or "")
        )
    return blocks


def console_commands(code: str) -> list[tuple[str, str]]:
    """Returns commands after ``$`` and the output below each."""
    parts = re.split(r"^\$ (.*)\n", code, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def matches(output: str, shown: str) -> bool:
    """Returns whether an output matches a page. A line ``...`` matches any lines, and ``...`` at
    the end of a line matches the rest of it. Spaces at the ends of lines are ignored."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else _line_pattern(line) for line in shown.splitlines()
    )
    lines = "".join(f"{line.rstrip()}\n" for line in output.splitlines())
    return re.fullmatch(pattern, lines) is not None


def _line_pattern(line: str) -> str:
    line = line.rstrip()
    if line.endswith("..."):
        return re.escape(line.removesuffix("...")) + r".*\n"
    return re.escape(line) + r"\n"
