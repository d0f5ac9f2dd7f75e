"""Tensor-Train tables with plain einsum in float64, and random tables for comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from torchrec_hkv.tensor_train import TTGroup, TTShape, factor_dim, factor_rows, max_ranks

#: Shapes for the kernels of larger tables.
LARGER = [
    TTShape(3500, 64, (14, 25, 10), (4, 4, 4), (32, 32)),
    TTShape(700, 32, (28, 25), (8, 4), (16,)),
    TTShape(2000, 48, (7, 6, 7, 7), (2, 3, 4, 2), (9, 20, 11)),
    TTShape(3000, 64, (20, 9, 17), (4, 4, 4), (64, 64)),
    TTShape(500, 96, (8, 8, 8), (4, 4, 6), (24, 17)),
]


def dense_table(shape: TTShape, cores: Sequence[Tensor]) -> Tensor:
    """Computes the differentiable table, float64 ``[num_embeddings, embedding_dim]``."""
    table = torch.ones(1, 1, 1, dtype=torch.float64, device=cores[0].device)
    for k, core in enumerate(cores):
        core = core.double().reshape(shape.core_shape(k))
        if k == shape.num_cores - 1:
            core = core.transpose(1, 2)
        table = torch.einsum("aur,irvs->aiuvs", table, core)
        table = table.reshape(
            table.shape[0] * table.shape[1], table.shape[2] * table.shape[3], table.shape[4]
        )
    return table[: shape.num_embeddings, :, 0]


def random_cores(shape: TTShape, device: str = "cpu", dtype=torch.float32) -> list[Tensor]:
    """Draws independent normal elements, scaled so that rows are of order 1."""
    scale = 1.0
    for rank in shape.ranks:
        scale /= rank**0.5
    scale **= 1 / shape.num_cores
    return [
        (torch.randn(size) * scale).to(device=device, dtype=dtype) for size in shape.core_shapes
    ]


@dataclasses.dataclass
class Bags:
    """A batch for a group of tables, feature-major."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor
    batch_size: int

    def to(self, device: str) -> Bags:
        moved = (self.ids.to(device), self.offsets.to(device), self.weights.to(device))
        return Bags(*moved, self.batch_size)


def random_bags(
    shapes: Sequence[TTShape],
    feature_tables: Sequence[int],
    batch_size: int,
    mean_length: int = 5,
    distinct: int | None = None,
) -> Bags:
    """Draws bags of random lengths, some empty. Ids repeat; ``distinct`` limits their number."""
    lengths = torch.randint(0, 2 * mean_length + 1, (len(feature_tables), batch_size))
    lengths[torch.rand(lengths.shape) < 0.2] = 0
    ids = []
    for feature, table in enumerate(feature_tables):
        n = int(lengths[feature].sum())
        rows = shapes[table].num_embeddings
        some = torch.randint(0, rows, (rows if distinct is None else min(distinct, rows),))
        ids.append(some[torch.randint(0, some.numel(), (n,))])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.reshape(-1).cumsum(0)])
    all_ids = torch.cat(ids)
    return Bags(all_ids, offsets, torch.randn(all_ids.numel()), batch_size)


def reference_lookup(
    tables: Sequence[Tensor],
    feature_tables: Sequence[int],
    bags: Bags,
    *,
    weights: Tensor | None = None,
    mean: bool = False,
    pooled: bool = True,
) -> Tensor:
    """Looks up dense float64 tables with ``torch.nn.functional.embedding_bag``."""
    size = bags.batch_size
    parts = []
    for feature, table in enumerate(feature_tables):
        ends = bags.offsets[feature * size : (feature + 1) * size + 1]
        span = slice(int(ends[0]), int(ends[-1]))
        ids = bags.ids[span]
        if not pooled:
            parts.append(tables[table][ids])
            continue
        id_weights = torch.ones(ids.numel(), dtype=torch.float64, device=ids.device)
        if weights is not None:
            id_weights = weights[span].double()
        summed = functional.embedding_bag(
            ids,
            tables[table],
            ends - ends[0],
            mode="sum",
            per_sample_weights=id_weights,
            include_last_offset=True,
        )
        if mean:
            summed = summed / (ends[1:] - ends[:-1]).clamp(min=1)[:, None]
        parts.append(summed)
    return torch.cat(parts, dim=1 if pooled else 0)


def reference_lookup_by_sums(
    tables: Sequence[Tensor],
    feature_tables: Sequence[int],
    bags: Bags,
    *,
    weights: Tensor | None = None,
    mean: bool = False,
    pooled: bool = True,
) -> Tensor:
    """:func:`reference_lookup` without ``embedding_bag``, which can't be differentiated twice."""
    size, lengths = bags.batch_size, bags.offsets.diff()
    parts, first = [], 0
    for feature, table in enumerate(feature_tables):
        feature_lengths = lengths[feature * size : (feature + 1) * size]
        last = first + int(feature_lengths.sum())
        rows = tables[table][bags.ids[first:last]]
        if weights is not None and pooled:
            rows = rows * weights[first:last, None]
        first = last
        if pooled:
            of_bag = torch.zeros(size, rows.shape[0], dtype=rows.dtype, device=rows.device)
            bag = torch.repeat_interleave(torch.arange(size, device=rows.device), feature_lengths)
            of_bag[bag, torch.arange(rows.shape[0], device=rows.device)] = 1
            rows = of_bag @ rows
            rows = rows / feature_lengths.clamp(min=1)[:, None] if mean else rows
        parts.append(rows)
    return torch.cat(parts, dim=1 if pooled else 0)


def magnitudes(
    shapes: Sequence[TTShape],
    feature_tables: Sequence[int],
    bags: Bags,
    cores: Sequence[Sequence[Tensor]],
    grad: Tensor | None,
    weights: Tensor | None = None,
    **arguments: bool,
) -> list[Tensor]:
    """Computes sums of absolute values for the output, each core's gradient, and, with weights, the
    weights' gradient."""
    cores = [
        [core.detach().double().abs().requires_grad_() for core in table_cores]
        for table_cores in cores
    ]
    weights = None if weights is None else weights.detach().double().abs().requires_grad_()
    tables = [dense_table(s, table_cores) for s, table_cores in zip(shapes, cores, strict=True)]
    out = reference_lookup(tables, feature_tables, bags, weights=weights, **arguments)
    if grad is None:
        return [out.detach()]
    inputs = [
        *(core for table_cores in cores for core in table_cores),
        *([] if weights is None else [weights]),
    ]
    grads = torch.autograd.grad(out, inputs, grad.double().abs(), allow_unused=True)
    filled = [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, grads, strict=True)]
    return [out.detach(), *filled]


def assert_near(
    actual: Tensor, expected: Tensor, tolerance: float = 1e-5, magnitude: Tensor | None = None
) -> None:
    """Checks shape, finiteness, and equality within a share of the largest value; of ``magnitude``
    if it is given."""
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert torch.isfinite(actual).all()
    if expected.numel() == 0:
        return
    of = expected if magnitude is None else magnitude.detach().double().cpu()
    scale = of.abs().max().clamp(min=1e-30)
    worst = float((actual - expected).abs().max() / scale)
    assert worst <= tolerance, f"off by {worst:.2e} of the largest value"


#: Devices and precisions of lookups. A CPU has one precision.
on_devices = pytest.mark.parametrize(
    ("device_type", "precision"),
    [
        ("cpu", "fp32"),
        pytest.param("cuda", "fp32", marks=pytest.mark.gpu),
        pytest.param("cuda", "tf32", marks=pytest.mark.gpu),
    ],
    indirect=["device_type"],
)


def assert_within(
    actual: Tensor, expected: Tensor, precision: str, magnitude: Tensor | None = None
) -> None:
    """:func:`assert_near` for ``"fp32"``; for ``"tf32"`` a relative error of 1e-3 in the norm."""
    if precision == "fp32":
        assert_near(actual, expected, magnitude=magnitude)
        return
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    error = float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
    assert error <= 1e-3, f"off by {error:.2e}"


@st.composite
def shapes(draw, dim: int | None = None) -> TTShape:
    """Draws small shapes of 2 to 4 cores, with padding and odd ranks."""
    cores = draw(st.integers(2, 4))
    rows = draw(st.integers(1, 300))
    dim = draw(st.integers(1, 24)) if dim is None else dim
    p = list(factor_rows(rows, cores))
    p[draw(st.integers(0, cores - 1))] += draw(st.integers(0, 2))
    q = draw(st.permutations(factor_dim(dim, cores)))
    ranks = [draw(st.integers(1, min(maximum, 11))) for maximum in max_ranks(p, q)]
    return TTShape(rows, dim, tuple(p), tuple(q), tuple(ranks))


def even_bags(shapes: Sequence[TTShape], batch_size: int = 40, length: int = 5) -> Bags:
    """Creates bags of one length on a GPU, with one feature per table."""
    ids = [torch.randint(0, s.num_embeddings, (batch_size * length,)) for s in shapes]
    offsets = torch.arange(0, len(shapes) * batch_size * length + 1, length)
    all_ids = torch.cat(ids)
    return Bags(all_ids, offsets, torch.randn(all_ids.numel()), batch_size).to("cuda")


class TrainedCores:
    """Cores of a group on a GPU, with their optimizer."""

    def __init__(self, group: TTGroup, cores: list[torch.Tensor]) -> None:
        self.group, self.cores = group, cores
        self.states = group.make_states("cuda")
        self.counter = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.rate = torch.tensor(0.05, device="cuda")
        self.anchor = torch.zeros(0, device="cuda", requires_grad=True)

    def step(self, bags: Bags, grad: torch.Tensor, **pooling: Any) -> torch.Tensor:
        """Runs a step with a gradient of the output; returns the output."""
        out = self.group.lookup_fused(
            self.anchor, self.cores, self.states, self.counter,
            bags.ids, bags.offsets, bags.batch_size, self.rate, **pooling,
        )  # fmt: skip
        out.backward(grad)
        return out.detach()
