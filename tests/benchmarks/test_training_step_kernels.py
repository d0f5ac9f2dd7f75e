"""The benchmark of a step's kernels parses Nsight Compute's output, and counts the least bytes of a
step."""

import json
import sys

import pytest
import torch

pytest.importorskip("fbgemm_gpu")

from benchmarks.training_step import Workload
from benchmarks.training_step_kernels import (
    MARK,
    METRICS,
    measure_step,
    min_bytes,
    parse_kernels,
)

HEADER = ["ID", "Kernel Name", *(metric for metric, _ in METRICS.values())]


def lines(*kernels):
    rows = [HEADER, ["", "", "nsecond", "byte", "byte"]]
    rows += [[str(at), name, *figures] for at, (name, *figures) in enumerate(kernels)]
    return ["==PROF== Profiling", *(",".join(f'"{cell}"' for cell in row) for row in rows)]


def mark():
    return (MARK, "900", "0", "0")


def test_kernels_of_a_stage():
    found = parse_kernels(
        lines(
            ("begin_kernel", "1,000", "0", "64"),
            ("find_kernel", "2,500", "3,000,000", "1,000,000"),
            mark(),
            ("begin_kernel", "1000", "500000", "0"),
            mark(),
            ("sort_kernel", "1500", "1000000", "2000000"),
            ("begin_kernel", "1000", "0", "0"),
            ("sort_kernel", "500", "3000000", "0"),
        )
    )
    assert [(row["stage"], row["kernel"], row["launches"]) for row in found] == [
        ("lookup", "begin_kernel", 1),
        ("lookup", "find_kernel", 1),
        ("pooling", "begin_kernel", 1),
        ("update", "sort_kernel", 2),
        ("update", "begin_kernel", 1),
    ]
    sort = found[3]
    assert [sort[column] for column in METRICS] == pytest.approx([2.0, 4.0, 2.0])


@pytest.mark.parametrize("marks", [0, 1, 3])
def test_marks_are_missed(marks):
    with pytest.raises(ValueError, match=rf"ncu has {marks} of the 2 marks"):
        parse_kernels(lines(("find_kernel", "1", "1", "1"), *[mark()] * marks))


@pytest.mark.parametrize("state_width", [1, 32])
def test_least_bytes(state_width):
    work = Workload(tables=2, rows=500, dim=16, batch=30, bag=4)
    slots = torch.randint(1000, (2 * 30 * 4,))
    touched = set(slots.tolist())
    sectors = {slot * 4 // 32 for slot in touched}  # of last steps, and of 4-byte states
    rows = len(touched) * 16 * 4
    states = 32 * len(sectors) if state_width == 1 else len(touched) * state_width * 4
    columns = 30 * 2 * 16 * 4
    found = 128 * len({slot // 64 for slot in touched}) + 32 * len({s * 8 // 32 for s in touched})
    assert min_bytes(slots, work, state_width) == {
        "lookup": (8 * 240 + found + 32 * len(sectors), 8 * 240 + 32 * len(sectors)),
        "pooling": (8 * 240 + rows, columns),
        "update": (8 * 240 + columns + rows + states, rows + states),
    }


def in_place_of_ncu(path, log, said, code=0):
    """A stand-in for ncu that writes a log and reports what the step does."""
    path.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys\n"
        "place = sys.argv[sys.argv.index('--log-file') + 1]\n"
        f"pathlib.Path(place).write_text({log!r})\n"
        f"print({said!r})\n"
        f"sys.exit({code})\n"
    )
    path.chmod(0o755)
    return str(path)


def test_rows_of_a_step(tmp_path):
    kernels = [("find_kernel", "2500", "3000000", "1000000"), mark(), mark()]
    minimum = {"lookup": [2_000_000, 500_000], "pooling": [1_000_000, 0], "update": [0, 3_000_000]}
    said = json.dumps({"least": minimum, "rate": 1e12})
    ncu = in_place_of_ncu(tmp_path / "ncu", "\n".join(lines(*kernels)), f"warm\n{said}")
    assert list(measure_step(ncu, "S1", "adam", 0.8)) == [
        {
            "stage": stage,
            "kernel": kernel,
            "launches": launches,
            **dict(zip(METRICS, figures, strict=True)),
        }
        for stage, kernel, launches, *figures in (
            ("lookup", "least", 0, 2.5, 2.0, 0.5),
            ("lookup", "find_kernel", 1, 2.5, 3.0, 1.0),
            ("pooling", "least", 0, 1.0, 1.0, 0.0),
            ("update", "least", 0, 3.0, 0.0, 3.0),
        )
    ]


def test_ncu_fails(tmp_path):
    ncu = in_place_of_ncu(tmp_path / "ncu", "==ERROR== no permission", "", code=3)
    with pytest.raises(RuntimeError, match=r"ncu exits with 3\.\n==ERROR== no permission"):
        list(measure_step(ncu, "S1", "adam", 0.8))
