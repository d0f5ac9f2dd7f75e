"""Trains rows of a hash table with an optimizer, and the same rows with a reference in float64.

Gradients are small multiples of a power of two, so that their sums by row are exact in float32, and
all differences come from the optimizer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from tests.support.batches import Bags, lookup, random_ids
from torchrec_hkv.hash_table import Optimizer, TableGroup, TableSpec, Uniform, initial_rows
from torchrec_hkv.hash_table.stored_rows import numbers_of

ROWS = 40
STEPS = 50
#: A dim that kernels read four columns at a time, one that they don't, and one larger than a warp.
DIMS = (8, 7, 260)
#: For each number of lanes and vectors of a GPU's kernels, full and not.
WIDTHS = (4, 12, 32, 64, 100, 128, 132, 200, 256, 384, 512, 768, 1024)


class Reference(Protocol):
    """The rows of all ids in float64, trained by another implementation."""

    rows: Tensor

    def update(self, grads: Tensor, touched: Tensor, learning_rate: float) -> None:
        """Updates the touched rows.

        Args:
            grads: ``[ids, dim]``, zeros for ids that were not touched.
            touched: bool ``[ids]``.
            learning_rate: learning rate of the step.
        """

    def states(self) -> Tensor:
        """Returns the expected state of each row, ``[ids, width]`` without padding."""


class DenseReference:
    """A PyTorch optimizer on a dense matrix; untouched rows and states are restored."""

    def __init__(
        self,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        state_names: Sequence[str] = (),
    ) -> None:
        self._make = make
        self._names = state_names
        self._parameter: nn.Parameter | None = None

    @property
    def rows(self) -> Tensor:
        return self._parameter.data

    @rows.setter
    def rows(self, rows: Tensor) -> None:
        self._parameter = nn.Parameter(rows.clone())
        self._optimizer = self._make([self._parameter])

    def _tensors(self) -> dict[str, Tensor]:
        state = self._optimizer.state[self._parameter]
        return {name: state[name] for name in self._names if state.get(name) is not None}

    def update(self, grads: Tensor, touched: Tensor, learning_rate: float) -> None:
        before = {name: tensor.clone() for name, tensor in self._tensors().items()}
        rows = self.rows.clone()
        self._parameter.grad = grads.clone()
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()
        self.rows[~touched] = rows[~touched]
        for name, tensor in self._tensors().items():
            tensor[~touched] = before[name][~touched] if name in before else 0.0

    def states(self) -> Tensor:
        return torch.cat([self.rows[:, :0], *self._tensors().values()], dim=1)


class RowByRowReference:
    """A :class:`DenseReference` for each row, which steps only if the row is touched."""

    def __init__(self, make: Callable[[], DenseReference]) -> None:
        self._make = make

    @property
    def rows(self) -> Tensor:
        return torch.cat([reference.rows for reference in self._references])

    @rows.setter
    def rows(self, rows: Tensor) -> None:
        self._references = [self._make() for _ in rows]
        self._steps = [0] * len(rows)
        for reference, row in zip(self._references, rows, strict=True):
            reference.rows = row.unsqueeze(0)

    def update(self, grads: Tensor, touched: Tensor, learning_rate: float) -> None:
        for row in touched.nonzero().flatten().tolist():
            self._references[row].update(
                grads[row : row + 1], touched[row : row + 1], learning_rate
            )
            self._steps[row] += 1

    def states(self) -> Tensor:
        steps = torch.tensor(self._steps, dtype=torch.double).unsqueeze(1)
        return torch.cat([torch.cat([r.states() for r in self._references]), steps], dim=1)


@dataclasses.dataclass
class TrainedGroup:
    """Results by id, in the order of the reference's rows.

    Attributes:
        group: group of one table.
        rows: float64 ``[ids, dim]``.
        states: float64 ``[ids, state width]``.
    """

    group: TableGroup
    rows: Tensor
    states: Tensor


def exact_gradients(*shape: int) -> Tensor:
    """Draws multiples of 2^-7 from -1 to 1, except 0."""
    return torch.randint(1, 129, shape) / 128 * (torch.randint(0, 2, shape) * 2 - 1)


def make_group(
    optimizer: Optimizer, dim: int, device: str, capacity: int = 400, dtype=torch.float32
) -> TableGroup:
    """Creates a group of one table that is large enough to avoid evictions."""
    spec = TableSpec("t", capacity, dim, initializer=Uniform(-1, 1), dtype=dtype)
    return TableGroup([spec], [0], optimizer, device=device)


def read_rows(group: TableGroup, names: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows and states of ids, which must be in the table, float64 on the CPU."""
    state = group.export_table(0)
    slots = group.find(names.to(group.device), None, 1)
    assert (slots >= 0).all()
    rows = numbers_of(state.rows[slots], group.tables[0].dim)
    return rows.double().cpu(), state.states[slots].double().cpu()


def train_with_reference(
    optimizer: Optimizer,
    reference: Reference,
    device: str,
    dim: int,
    *,
    learning_rate: float = 0.01,
    steps: int = STEPS,
    rate_changes: bool = True,
    prepare: Callable[[Tensor], Tensor] = lambda grads: grads,
) -> TrainedGroup:
    """Trains both, by default with a learning rate that changes in every step.

    Args:
        optimizer: optimizer of the table.
        reference: reference with the same optimizer.
        device: device of the table.
        dim: dim of the rows.
        learning_rate: mean learning rate.
        steps: number of steps.
        rate_changes: whether the learning rate changes.
        prepare: transforms the gradients of rows for the reference.
    """
    names = random_ids(ROWS).unique()
    group = make_group(optimizer, dim, device)
    reference.rows = initial_rows(names, dim, table="t", initializer=Uniform(-1, 1)).double()
    for step in range(steps):
        rate = learning_rate * (1 + 0.5 * math.sin(step) * rate_changes)
        # About half of the ids occur in a batch, some of them several times.
        rows = Bags.random(1, 12, torch.arange(len(names)), longest=4)
        if step == 0:  # every id occurs once
            rows = Bags(torch.arange(len(names)), torch.arange(len(names) + 1), len(names))
        grad = exact_gradients(rows.batch_size, dim)
        out = lookup(
            group,
            Bags(names[rows.ids], rows.offsets, rows.batch_size).to(device),
            learning_rate=rate,
        )
        out.backward(grad.to(device))
        bag_of = torch.repeat_interleave(torch.arange(rows.batch_size), rows.offsets.diff())
        summed = torch.zeros(len(names), dim, dtype=torch.double)
        summed.index_add_(0, rows.ids, grad.double()[bag_of])
        touched = torch.zeros(len(names), dtype=torch.bool).index_fill_(0, rows.ids, True)
        reference.update(prepare(summed), touched, rate)
    return TrainedGroup(group, *read_rows(group, names))


def assert_equal_to(reference: Reference, trained: TrainedGroup) -> None:
    """Compares rows and states to 1e-6, and checks for zeros in the states' padding."""
    torch.testing.assert_close(trained.rows, reference.rows, rtol=1e-6, atol=1e-6)
    expected = reference.states()
    width = expected.shape[1]
    # The error of a sum is relative to the size of its terms, which may have either sign.
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(trained.states[:, :width], expected, rtol=1e-5, atol=1e-6 * scale)
    assert (trained.states[:, width:] == 0).all()
    assert trained.states.shape[1] - width < 4
    assert trained.states.shape[1] == trained.group.optimizer.state_width(trained.rows.shape[1])
