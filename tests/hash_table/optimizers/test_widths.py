"""Updates of rows of every width equal a float64 reference.

GPU kernels depend on width, dtype and the frequency of ids, so the batch has ids that occur once,
several times, and in most positions.
"""

import pytest
import torch

from tests.support.batches import Bags, lookup, random_ids
from tests.support.pairwise import pairwise
from tests.support.row_training import exact_gradients, make_group, read_rows
from torchrec_hkv.hash_table import Adagrad

#: Widths below and above a kernel's tile of lanes, and widths that are no multiple of four.
WIDTHS = (1, 4, 33, 36, 64, 68, 100, 128, 132, 256, 260, 512, 515, 516, 1024, 1028, 2048)
EPS, LEARNING_RATE = 1e-3, 0.1
STEPS = 3


def skewed_batch(names: torch.Tensor) -> torch.Tensor:
    """Rows of the positions, shuffled: one id at 1500 positions, one at 300, all others at one or
    two."""
    rows = torch.cat(
        [
            torch.zeros(1500, dtype=torch.long),
            torch.ones(300, dtype=torch.long),
            torch.arange(2, len(names)),
            torch.arange(2, len(names), 2),
        ]
    )
    return rows[torch.randperm(len(rows))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "dtype", "decay"),
    pairwise(WIDTHS, [torch.float32, torch.float16, torch.bfloat16], [0.0, 0.1]),
)
def test_equal_to_float64(device_type, dim, dtype, decay):
    names = random_ids(150).unique()
    group = make_group(Adagrad(EPS, weight_decay=decay), dim, device_type, 2000, dtype)
    everyone = Bags(names, torch.arange(len(names) + 1), len(names)).to(device_type)
    lookup(group, everyone)  # inserts
    for _ in range(STEPS):
        before, squares = read_rows(group, names)
        rows = skewed_batch(names)
        grad = exact_gradients(len(rows), dim)
        bags = Bags(names[rows], torch.arange(len(rows) + 1), len(rows)).to(device_type)
        lookup(group, bags, learning_rate=LEARNING_RATE).backward(grad.to(device_type))

        total = torch.zeros(len(names), dim, dtype=torch.double).index_add_(0, rows, grad.double())
        total += decay * before
        squares[:, :dim] += total.square()
        exact = before - LEARNING_RATE * total / (squares[:, :dim].sqrt() + EPS)
        trained, states = read_rows(group, names)
        nearest = (exact.to(dtype).double() - exact).abs()
        assert ((trained - exact).abs() <= nearest + 1e-6 * (1 + exact.abs())).all()
        torch.testing.assert_close(states, squares, rtol=1e-5, atol=1e-6)
        # The old 16-bit value may be the nearest to the new one.
        assert float((trained != before).double().mean()) > 0.5
