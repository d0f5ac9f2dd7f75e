"""A training step of Tensor-Train tables of many ranks, columns and cores.

    python -m benchmarks tensor_train_shapes --out benchmarks/results/tensor_train_shapes.csv

Times are of back-to-back steps with forward, backward and SGD through the torch op, on four batches
of uniform ids in turn. Tables have 11 million rows, or the number that ``section`` names.
``over_first`` is the time divided by that of the first table: 64 columns, three cores with q = 4,
4, 4, ranks 32.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.timing import steps_ms
from torchrec_hkv.hash_table import SGD
from torchrec_hkv.tensor_train import TTGroup, TTShape, factor_rows, initial_cores, max_ranks

BATCHES = 4
RATE = 0.01
#: Row factors by number of cores.
P = {2: (3300, 3400), 3: (200, 220, 250), 4: (58, 58, 58, 57)}
#: Key columns: a new run replaces rows with the same key in the file.
KEYS = ("section", "q", "rank", "precision", "ids", "device")


@dataclasses.dataclass(frozen=True)
class Case:
    """A table, given by its column factors and ranks."""

    section: str
    q: tuple[int, ...]
    rank: int
    rows: int | None = None

    def shape(self, divisor: int) -> TTShape:
        """Returns the shape with row factors divided by ``divisor``."""
        factors = P[len(self.q)] if self.rows is None else factor_rows(self.rows, len(self.q))
        p = tuple(max(2, factor // divisor) for factor in factors)
        ranks = tuple(min(self.rank, maximum) for maximum in max_ranks(p, self.q))
        return TTShape(math.prod(p), math.prod(self.q), p, self.q, ranks)


FIRST = Case("ranks", (4, 4, 4), 32)
CASES = (
    FIRST,
    *(Case("ranks", (4, 4, 4), r) for r in (4, 8, 16, 24, 40, 48, 56, 64, 96, 128)),
    *(
        Case("columns", q, 32)
        for q in (
            (4, 2, 4), (4, 3, 3), (2, 4, 5), (4, 3, 4), (4, 4, 5), (4, 4, 6), (4, 6, 4), (5, 4, 5),
            (4, 4, 8), (5, 4, 8), (6, 4, 8), (8, 4, 8), (8, 5, 8),
        )
    ),
    *(Case("columns, rank 64", q, 64) for q in ((2, 4, 5), (4, 4, 5), (4, 4, 6), (4, 4, 8))),
    *(Case("cores", q, 32) for q in ((8, 8), (8, 16), (4, 2, 2, 4), (4, 2, 4, 4))),
    Case("cores", (8, 8), 64),
    *(Case(f"10^{k} rows", (4, 4, 4), 32, 10**k) for k in (6, 7, 8, 9)),
)  # fmt: skip


def nanoseconds(
    shape: TTShape, precision: str, device: torch.device, args: argparse.Namespace
) -> float:
    """Returns nanoseconds per id of a step."""
    group = TTGroup([shape], optimizer=SGD(), precision=precision)
    cores = list(initial_cores(shape, std=0.1, device=device))
    states = group.make_states(device)
    counter = torch.zeros(1, dtype=torch.int64, device=device)
    rate = torch.tensor(RATE, device=device)
    anchor = torch.zeros(0, device=device, requires_grad=True)
    bags = args.ids // args.bag
    n = bags * args.bag
    ids = [torch.randint(shape.num_embeddings, (n,), device=device) for _ in range(BATCHES)]
    offsets = torch.arange(bags + 1, device=device) * args.bag
    grad = torch.randn(bags, shape.embedding_dim, device=device)

    def step(at: int) -> None:
        out = group.lookup_fused(
            anchor, cores, states, counter, ids[at % BATCHES], offsets, bags, rate
        )
        out.backward(grad)

    return 1e6 * steps_ms(step, args.steps, device) / n


def _rows(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    device = torch.device(args.device)
    for precision in args.precisions:
        first: float | None = None
        for case in CASES:
            if case != FIRST and args.sections and case.section not in args.sections:
                continue
            shape = case.shape(args.divisor)
            spent = nanoseconds(shape, precision, device, args)
            first = spent if first is None else first
            yield {
                "section": case.section,
                "columns": shape.embedding_dim,
                "q": " ".join(map(str, case.q)),
                "rank": case.rank,
                "precision": precision,
                "ids": args.ids // args.bag * args.bag,
                "ns_per_id": round(spent, 3),
                "over_first": round(spent / first, 3),
            }
            if device.type == "cuda":
                torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> None:
    """Measures all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    sections = list(dict.fromkeys(case.section for case in CASES))
    parser.add_argument(
        "--sections", nargs="+", choices=sections, help="some of them, and the first table"
    )
    parser.add_argument(
        "--precisions", nargs="+", choices=["tf32", "fp32"], help="default: those of the device"
    )
    parser.add_argument("--ids", type=AtLeast(1), default=1_310_720, help="of a batch")
    parser.add_argument("--bag", type=AtLeast(1), default=20, help="ids a bag")
    parser.add_argument("--steps", type=AtLeast(1), default=12, help="timed steps a round")
    parser.add_argument("--divisor", type=AtLeast(1), default=1, help="of row factors, for tests")
    parser.add_argument("--out", type=Path, default=None, help="CSV file")
    args = parser.parse_args(arguments)
    if args.bag > args.ids:
        parser.error(f"--bag is {args.bag}, but --ids is {args.ids}: a batch has at least one bag")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA GPU; --device cpu needs none")
    if args.precisions is None:
        args.precisions = ["tf32", "fp32"] if args.device == "cuda" else ["fp32"]
    if args.device == "cpu" and "tf32" in args.precisions:
        parser.error("--precisions tf32 needs --device cuda; a CPU has fp32")
    report(_rows(args), args.out, KEYS)


if __name__ == "__main__":
    main()
