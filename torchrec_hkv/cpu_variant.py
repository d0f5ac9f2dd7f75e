"""Loads the build of the extension that suits this CPU.

A release wheel for CPUs has two builds of ``torchrec_hkv._C``: one for x86-64-v2, where Python
finds it, and one for x86-64-v3 (AVX2) in the folder ``_v3``. Other builds of the package only have
the first. Hash tables give bitwise equal results with both.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from torchrec_hkv import environment

#: CPU flags in Linux of the instructions that x86-64-v3 adds to x86-64-v2.
V3_FLAGS = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
VARIANTS = ("v2", "v3")
FOLDER = Path(__file__).parent


def chosen() -> str:
    """The variant to load: ``"v3"`` if it is installed and the CPU supports it, else ``"v2"``.

    The environment variable ``TORCHREC_HKV_CPU_VARIANT`` takes precedence.

    Raises:
        ValueError: the variable is neither ``v2`` nor ``v3``, or the CPU can't run ``v3``.
    """
    requested = environment.text("CPU_VARIANT")
    if requested not in (None, *VARIANTS):
        raise ValueError(f"{environment.PREFIX}CPU_VARIANT is {requested!r}, but must be v2 or v3.")
    runs = _v3_file() is not None and cpu_flags() >= V3_FLAGS
    if requested == "v3" and not runs:
        raise ValueError(
            f"{environment.PREFIX}CPU_VARIANT is 'v3', but must be v2: this installation has no "
            "v3, or this CPU does not run it."
        )
    return requested or ("v3" if runs else "v2")


def load() -> ModuleType:
    """Imports ``torchrec_hkv._C``.

    Raises:
        ImportError: the extension is missing, or does not match the installed torch.
        ValueError: see :func:`chosen`.
    """
    path = _v3_file()
    if path is None or chosen() == "v2":
        return importlib.import_module("torchrec_hkv._C")
    name = "torchrec_hkv._C"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    sys.modules["torchrec_hkv"]._C = module  # type: ignore[attr-defined]
    return module


def cpu_flags() -> set[str]:
    """The CPU's flags in Linux; empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _v3_file() -> Path | None:
    return next(iter(sorted((FOLDER / "_v3").glob("_C.*.so"))), None)
