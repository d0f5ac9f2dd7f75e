"""Refuses a torch that the extension was not built for.

The C++ interface of torch is stable only within a minor version. A CUDA build also loads torch's
CUDA libraries, whose interface is stable within a major version. With another torch, the loader
would at best name a missing symbol or library. ``setup.py`` writes the versions that it builds for
to ``_built_for.py``.
"""

from __future__ import annotations

import importlib

import torch


def check() -> None:
    """Does nothing if the record of the build is missing.

    Raises:
        ImportError: the extension does not match the installed torch.
    """
    try:
        built = importlib.import_module("torchrec_hkv._built_for")
    except ModuleNotFoundError:
        return
    sentence = mismatch(built.TORCH, built.CUDA, str(torch.__version__), torch.version.cuda)
    if sentence is not None:
        raise ImportError(sentence)


def mismatch(
    built_torch: str, built_cuda: str | None, torch_version: str, cuda: str | None
) -> str | None:
    """A sentence that says why an extension does not match a torch; None if it does.

    Args:
        built_torch: version of the torch that the extension was built with.
        built_cuda: version of CUDA that it was built for; None for the CPU.
        torch_version: version of the installed torch.
        cuda: version of CUDA of the installed torch; None for the CPU.
    """
    minor, major = _start(built_torch, 2), _start(built_cuda or "", 1)
    fits = cuda is not None and _start(cuda, 1) == major
    if _start(torch_version, 2) == minor and (built_cuda is None or fits):
        return None
    needed = f" for CUDA {major}" if built_cuda else ""
    present = f"for CUDA {cuda}" if cuda else "without CUDA"
    return (
        f"torchrec_hkv was built for torch {minor}{needed}, but torch {torch_version} {present} is "
        f"installed: install torch=={minor}.*{needed}, or build torchrec_hkv for this torch."
    )


def _start(version: str, parts: int) -> str:
    return ".".join(version.split("+")[0].split(".")[:parts])
