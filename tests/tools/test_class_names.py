"""No two top-level classes of the package have one name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "torchrec_hkv"


def top_level_classes(source: str) -> list[str]:
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]


def test_top_level_classes():
    source = (
        "class A:\n    class Inner: pass\n\nclass _B(A): pass\n\ndef f():\n    class Local: pass\n"
    )
    assert top_level_classes(source) == ["A", "_B"]


def test_class_names_are_unique():
    modules = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in top_level_classes(path.read_text()):
            modules[name].append(str(path.relative_to(PACKAGE)))
    assert len(modules) > 300
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
