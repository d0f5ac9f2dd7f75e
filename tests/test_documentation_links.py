"""Links of the documentation point to existing files and sections."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not any(
        part.startswith(".") or part == "build" for part in page.relative_to(ROOT).parts[:-1]
    )
)
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^()\s>]+)>?(?: \"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)? *$", re.MULTILINE)
# Comments and docstrings name pages without a link.
NAMED = re.compile(r"\bdocs/[\w/]+\.md\b")


def _anchors(page: Path) -> set[str]:
    """The sections of a page, as GitHub names them."""
    anchors: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", page.read_text())):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        again = 0
        while (anchor := f"{name}-{again}" if again else name) in anchors:
            again += 1
        anchors.add(anchor)
    return anchors


def _links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    return [link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for link in _links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        is_there = target.exists()
        if is_there and anchor and target.suffix == ".md":
            is_there = anchor in _anchors(target)
        if not is_there:
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("folder", ["benchmarks", "csrc", "examples", "tests", "torchrec_hkv"])
def test_pages_that_sources_name_are_there(folder):
    missing = {
        f"{source.relative_to(ROOT)}: {name}"
        for source in (ROOT / folder).rglob("*")
        if source.suffix in {".py", ".h", ".cuh", ".cpp", ".cu"}
        for name in NAMED.findall(source.read_text())
        if not (ROOT / name).exists()
    }
    assert not missing


def test_every_page_is_in_the_index():
    docs = ROOT / "docs"
    index = docs / "README.md"  # Sphinx has index.md
    named = {(docs / link.partition("#")[0]).resolve() for link in _links(index)}
    pages = {page for page in PAGES if page.is_relative_to(docs)}
    assert pages <= named | {index, docs / "index.md"}
