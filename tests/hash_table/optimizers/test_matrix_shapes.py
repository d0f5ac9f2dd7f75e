"""The widths, optimizers, dtypes and skews of the benchmark matrix against float64.

Rows of the reference are reduced by ``torch.nn.functional.embedding_bag``, whose autograd gives
their gradients, and updated by the published formulas.
"""

import pytest
import torch
from torch.nn import functional

from benchmarks.ids import power_law
from benchmarks.matrix_cells import DIMS, OPTIMIZERS, SKEWS
from tests.support.batches import Bags, lookup, random_ids
from tests.support.pairwise import pairwise
from tests.support.row_training import exact_gradients
from torchrec_hkv.hash_table import TableGroup, TableSpec, Uniform

ROWS, BAG, STEPS = 300, 16, 2  # means of 16 ids and sums of these gradients are exact
RATE = 0.05
DECAY = 0.01  # AdamW's default


def draw(skew: str, n: int) -> torch.Tensor:
    """Numbers of rows."""
    if skew in ("uniform", "hot"):
        rows = torch.randint(ROWS, (n,))
        return rows.where(torch.rand(n) >= 0.9, 7) if skew == "hot" else rows
    return power_law(n, ROWS, float(skew), torch.device("cpu"))


def updated(optimizer, rows, states, grads, step):
    """Rows and states after a step, of rows that the batch has."""
    dim, eps = rows.shape[1], 1e-8
    if optimizer == "sgd":
        return rows - RATE * grads, states
    if optimizer == "rowwise_adagrad":
        states = states + grads.square().mean(dim=1, keepdim=True)
        return rows - RATE * grads / (states.sqrt() + eps), states
    if optimizer == "adagrad":
        states = states + grads.square()
        return rows - RATE * grads / (states.sqrt() + eps), states
    if optimizer == "ftrl":  # without beta, l1 and l2
        sums, squares = states[:, :dim], states[:, dim : 2 * dim]
        root, next_root = (squares + 0.1).sqrt(), (squares + grads.square() + 0.1).sqrt()
        sums = sums.where(squares > 0, -root / RATE * rows)  # of a new row
        sums = sums + grads - (next_root - root) / RATE * rows
        return -sums * RATE / next_root, torch.cat([sums, squares + grads.square()], dim=1)
    mean = 0.9 * states[:, :dim] + 0.1 * grads
    square = 0.999 * states[:, dim : 2 * dim] + 0.001 * grads.square()
    move = mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + eps)
    if optimizer == "adamw":
        move = move + DECAY * rows
    if optimizer == "lamb":
        move = move * (rows.norm(dim=1) / move.norm(dim=1))[:, None]
    return rows - RATE * move, torch.cat([mean, square], dim=1)


def terms_of(optimizer, rows, states, grads, renewed):
    """Magnitudes of what is added up to new states. Where the terms of a sum cancel out, its error
    is relative to them."""
    if states.shape[1] < 2 * rows.shape[1]:
        return renewed
    dim = rows.shape[1]
    first = states[:, :dim].abs() + grads.abs()
    if optimizer == "ftrl":
        first = first + (renewed[:, dim : 2 * dim] + 0.1).sqrt() / RATE * rows.abs()
    return torch.cat([first, renewed[:, dim:]], dim=1)


def stored(group, table, names):
    """Rows and states of all ids of a table, float64."""
    state = group.export_table(table)
    ids = state.ids.where(state.occupied, -1)
    slots = (ids[None] == names[:, None].to(ids.device)).int().argmax(dim=1)
    return state.rows[slots].double(), state.states[slots].double()


@pytest.mark.parametrize(
    ("dim", "optimizer", "dtype", "skew", "reduction"),
    pairwise(
        DIMS,
        list(OPTIMIZERS),
        [torch.float32, torch.float16, torch.bfloat16],
        SKEWS,
        ["sum", "mean", "weighted"],
    ),
)
def test_equal_to_float64(device_type, dim, optimizer, dtype, skew, reduction):
    torch.manual_seed(dim)
    batch = 64 if device_type == "cpu" else 2048  # of two tables: as many ids as large sorts take
    names = random_ids(ROWS + 50).unique()[:ROWS]
    specs = [
        TableSpec(f"t{t}", 2 * ROWS, dim, initializer=Uniform(-1, 1), dtype=dtype) for t in range(2)
    ]
    group = TableGroup(specs, [0, 1], OPTIMIZERS[optimizer][0], device=device_type)
    group.find_or_insert(
        names.repeat(2).to(device_type), torch.tensor([0, ROWS, 2 * ROWS], device=device_type), 1
    )
    n = batch * BAG
    offsets = torch.arange(batch + 1) * BAG
    for step in range(1, STEPS + 1):
        before = [stored(group, table, names) for table in range(2)]
        numbers = torch.cat([draw(skew, n), draw(skew, n)])
        weights = None
        if reduction == "weighted":
            weights = torch.tensor([0.5, 1.0, 2.0])[torch.randint(3, (2 * n,))].to(device_type)
        bags = Bags(names[numbers], torch.arange(2 * batch + 1) * BAG, batch).to(device_type)
        out = lookup(group, bags, weights, reduction == "mean", RATE)
        grad = exact_gradients(batch, 2 * dim).to(device_type)
        out.backward(grad)
        for table, (rows, states) in enumerate(before):
            rows.requires_grad_()
            own = slice(table * n, (table + 1) * n)
            columns = slice(table * dim, (table + 1) * dim)
            scale = torch.full((n,), 1 / BAG if reduction == "mean" else 1.0, dtype=torch.double)
            expected = functional.embedding_bag(
                numbers[own].to(device_type),
                rows,
                offsets.to(device_type),
                mode="sum",
                include_last_offset=True,
                per_sample_weights=scale.to(device_type)
                if weights is None
                else weights[own].double(),
            )
            torch.testing.assert_close(out[:, columns].double(), expected, rtol=1e-5, atol=1e-5)
            expected.backward(grad[:, columns].double())
            touched = torch.zeros(ROWS, dtype=torch.bool, device=device_type)
            touched[numbers[own].to(device_type)] = True
            with torch.no_grad():
                width = states.shape[1]
                moved, renewed = updated(optimizer, rows, states, rows.grad, step)
                moved = moved.where(touched[:, None], rows)
                renewed = renewed[:, :width].where(touched[:, None], states)
                after, after_states = stored(group, table, names)
                # What is stored is the nearest value of the dtype.
                nearest = (moved.to(dtype).double() - moved).abs()
                assert ((after - moved).abs() <= nearest + 2e-6 * (1 + moved.abs())).all()
                terms = terms_of(optimizer, rows, states, rows.grad, renewed)
                assert ((after_states - renewed).abs() <= 1e-6 + 2e-6 * terms).all()
                assert (after != rows).any(dim=1)[touched].all()
