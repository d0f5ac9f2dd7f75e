"""The reference documents every public name, operator and subcommand."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import torchrec_hkv
from torchrec_hkv.cli.main import _VERBS as VERBS

ROOT = Path(__file__).parents[2]
REFERENCE = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))


def public_packages(package) -> list[str]:
    """Names of public packages in a package, relative to ``torchrec_hkv``, without the
    command's."""
    return [
        f"{package.__name__}.{module.name}".removeprefix("torchrec_hkv.")
        for module in pkgutil.iter_modules(package.__path__)
        if module.ispkg and module.name != "cli"
    ]


PACKAGES = sorted(
    {*public_packages(torchrec_hkv), *public_packages(torchrec_hkv.integrations)} - {"integrations"}
)


def directives(name: str) -> set[str]:
    """The arguments of all directives with this name."""
    pattern = rf"^```\{{{name}\}} (.*)$"
    return set(" ".join(re.findall(pattern, REFERENCE, re.MULTILINE)).split())


@pytest.mark.parametrize("package", PACKAGES)
def test_packages(package):
    assert importlib.import_module(f"torchrec_hkv.{package}").__all__
    section = rf"^\.\. automodule:: torchrec_hkv\.{re.escape(package)}\n   :members:$"
    assert re.search(section, REFERENCE, re.MULTILINE)


def test_names_of_the_package():
    page = (ROOT / "docs" / "reference" / "torchrec_hkv.md").read_text()
    assert not [name for name in torchrec_hkv.__all__ if f"`{name}`" not in page]


def test_operators():
    schemas = torch._C._jit_get_all_schemas()
    names = {s.name for s in schemas if s.name.startswith("torchrec_hkv::")}
    assert directives("ops") == {name.removeprefix("torchrec_hkv::") for name in names}


def test_verbs():
    assert directives("command-help") == set(VERBS)
