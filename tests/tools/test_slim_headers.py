"""Headers that take seconds to compile are not included where little of them is needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Headers that include all of ATen or all of torch: 5 to 24 s a file.
LARGE = (
    "ATen/ATen.h",
    "ATen/Functions.h",
    "torch/all.h",
    "torch/extension.h",
    "torch/torch.h",
    "torch/types.h",
)


def included(path: Path) -> list[str]:
    """The names of the files that a source includes directly."""
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.M)


def sources(folder: str, *suffixes: str) -> list[Path]:
    """The C++ and CUDA files of a folder of ``csrc``."""
    found = sorted(p for p in (ROOT / "csrc" / folder).rglob("*") if p.suffix in suffixes)
    assert found
    return found


@pytest.mark.parametrize("path", sources(".", ".h", ".cpp", ".cu", ".cuh"), ids=lambda p: p.name)
def test_no_file_includes_all_of_torch(path):
    assert not set(included(path)) & set(LARGE)


def test_pybind11_is_included_where_python_objects_are_made():
    heavy = {
        str(path.relative_to(ROOT / "csrc"))
        for path in sources(".", ".h", ".cpp", ".cu", ".cuh")
        if any("pybind" in name for name in included(path))
    }
    assert heavy == {
        "bindings/hash_table/config_module.cpp",
        "bindings/hash_table/group_module.cpp",
        "bindings/hash_table/hash_table_module.h",
        "bindings/hash_table/optimizer_module.cpp",
        "bindings/hash_table/sizes_module.cpp",
        "bindings/module.cpp",
        "bindings/planner_module.cpp",
        "bindings/planner_module.h",
        "bindings/replay_module.cpp",
        "bindings/replay_module.h",
        "bindings/serving/id_lists.h",
        "bindings/serving/input_checks.h",
        "bindings/serving/served_calls.h",
        "bindings/serving/serving_module.cpp",
        "bindings/serving/serving_module.h",
        "bindings/tensor_train/tensor_train_module.cpp",
        "bindings/tensor_train/tensor_train_module.h",
    }


def test_the_check_of_cuda_calls_includes_no_strings():
    """Every CUDA file includes it."""
    assert included(ROOT / "csrc/common/cuda_check.h") == ["cuda_runtime.h"]
