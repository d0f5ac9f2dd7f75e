"""Prints versions, GPUs, and which kernels are built, with the reason if some are not.

torchrec-hkv env
torchrec-hkv env --json
"""

from __future__ import annotations

import argparse
import platform
from importlib import metadata
from typing import Any

import torch

from torchrec_hkv import _C, __version__
from torchrec_hkv.backends import registry
from torchrec_hkv.cli.result import CommandResult
from torchrec_hkv.hash_table import Uniform, initial_rows
from torchrec_hkv.planner.report import format_bytes

HELP = "versions, GPUs, and which kernels are built and why not"
_PACKAGES = ("torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy", "rich", "tensorboard")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This verb has no arguments of its own."""


def run(arguments: argparse.Namespace) -> CommandResult:
    """Inspects this installation."""
    content = {
        "versions": _versions(),
        "backends": registry.names(),
        "extension": _C.__file__,
        "kernels": {"cpu": True, "cuda": _C.has_cuda},
        "cuda": torch.version.cuda,
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
    }
    if not _C.has_cuda:
        content["why_no_cuda"] = _why_no_cuda()
    return CommandResult(_text(content), content)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "torchrec-hkv": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return (
            "torch is built for CPUs only: install a torch for CUDA, and build the package again."
        )
    return (
        "The extension was built without CUDA: there was no CUDA toolkit (nvcc), or "
        "TORCHREC_HKV_CUDA=0 was set; build it again with TORCHREC_HKV_CUDA=1."
    )


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    gpu = {
        "name": properties.name,
        "bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "runs_kernels": False,
    }
    if _C.has_cuda:
        try:  # only the driver knows whether kernels were compiled for this architecture
            ids = torch.zeros(1, dtype=torch.int64, device=f"cuda:{index}")
            initial_rows(ids, 1, table="env", initializer=Uniform(0.0, 1.0)).item()
            gpu["runs_kernels"] = True
        except RuntimeError as error:
            gpu["why_not"] = str(error).splitlines()[0]
    return gpu


def _text(content: dict[str, Any]) -> str:
    versions = content["versions"]
    lines = [f"{name:<16}{version or 'not installed'}" for name, version in versions.items()]
    lines += [
        "",
        f"{'backends':<16}{', '.join(content['backends'])}",
        f"{'extension':<16}{content['extension']}",
        f"{'CPU kernels':<16}built",
        f"{'CUDA kernels':<16}{'built' if content['kernels']['cuda'] else 'not built'}",
    ]
    if "why_no_cuda" in content:
        lines.append(f"{'':<16}{content['why_no_cuda']}")
    lines.append(f"{'CUDA of torch':<16}{content['cuda'] or 'none'}")
    for index, gpu in enumerate(content["gpus"]):
        runs = "runs the kernels" if gpu["runs_kernels"] else "does not run the kernels"
        name = f"{gpu['name']}, {format_bytes(gpu['bytes'])}, sm {gpu['compute_capability']}"
        lines.append(f"{f'GPU {index}':<16}{name}: {runs}")
        if "why_not" in gpu:
            lines.append(f"{'':<16}{gpu['why_not']}")
    if not content["gpus"]:
        lines.append(f"{'GPUs':<16}none")
    return "\n".join(lines)
