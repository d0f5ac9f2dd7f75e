"""Over hundreds of steps on a moving power law of ids, each batch found a step ahead, outputs, rows
and states equal those of a Python model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.batches import Bags, rate
from tests.support.gpu import NEEDS_GPU
from tests.support.power_law_bags import power_law_bags
from tests.support.row_stream import RowStream
from tests.support.row_training import exact_gradients
from tests.support.tiers import hbm_bytes_for
from torchrec_hkv.hash_table import SGD, RowWiseAdagrad, TableGroup, TableSpec, Uniform

STEPS = 500
FEATURES = 2  # per table
DIMS = (8, 20)
CAPACITY = 384
BATCH = 24
LEARNING_RATE = 0.125
EPS = 1e-6


@dataclasses.dataclass
class Step:
    """A batch, its gradient, and its results."""

    bags: Bags
    grad: torch.Tensor
    slots: torch.Tensor | None = None
    out: torch.Tensor | None = None

    @property
    def keys(self):
        """Table and id of each position."""
        return [(f, i) for f in range(FEATURES) for i in self.bags.feature(f)[0].tolist()]


def draw_steps():
    """Earlier ids return, and every hundred steps all ids are new."""
    steps = []
    for number in range(STEPS):
        bags = power_law_bags(number, FEATURES, BATCH, pool=600)
        bags.ids += number // 100 * 0x1234567
        steps.append(Step(bags, exact_gradients(BATCH, sum(DIMS))))
    return steps


class Trainer:
    """Trains a group on steps that are found ahead; on a GPU, on two other streams in turn."""

    def __init__(self, group):
        self.group = group
        self.gpu = group.device.type == "cuda"
        self.streams = [torch.cuda.Stream(priority=-1) for _ in range(2)] if self.gpu else []
        self.anchor = torch.empty(0, device=group.device, requires_grad=True)
        self.rate = rate(LEARNING_RATE, group)

    def find(self, bags):
        pin = self.group.pin()
        return bags, self.group.find_or_insert(bags.ids, bags.offsets, BATCH, pin), pin

    def find_ahead(self, bags):
        if not self.gpu:
            return *self.find(bags), None
        self.streams.append(self.streams.pop(0))
        with torch.cuda.stream(self.streams[0]):
            return *self.find(bags), self.streams[0].record_event()

    def step(self, found, grad):
        bags, slots, pin, event = found
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
            slots.record_stream(torch.cuda.current_stream())
        out = self.group.pooled_lookup(
            self.anchor, bags.ids, bags.offsets, None, slots, BATCH, False, pin, self.rate
        )
        out.backward(grad)
        return slots, out.detach()

    def run(self, steps):
        device = self.group.device
        batches = [step.bags.to(device) for step in steps]
        grads = [step.grad.to(device) for step in steps]
        if self.gpu:
            torch.cuda.synchronize()
        found = self.find_ahead(batches[0])
        for number, step in enumerate(steps):
            ahead = self.find_ahead(batches[number + 1]) if number + 1 < len(steps) else None
            step.slots, step.out = self.step(found, grads[number])
            found = ahead


def compare_step(model, step):
    lengths = step.bags.offsets.diff().tolist()
    expected = model.pooled(step.keys, lengths)
    out, column = step.out.cpu().double(), 0
    for feature, dim in enumerate(DIMS):
        for sample in range(BATCH):
            sums = expected[feature * BATCH + sample]
            got = out[sample, column : column + dim]
            torch.testing.assert_close(
                got, sums if len(sums) else torch.zeros_like(got), rtol=1e-5, atol=1e-5
            )
        column += dim
    parts = step.grad.split(DIMS, dim=1)
    gradients = [
        parts[bag // BATCH][bag % BATCH]
        for bag, length in enumerate(lengths)
        for _ in range(length)
    ]
    model.train(step.keys, gradients)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize(
    ("device", "hbm_share"),
    [
        pytest.param("cpu", None, id="cpu"),
        pytest.param("cuda", None, id="cuda", marks=NEEDS_GPU),
        pytest.param("cuda", 0.1, id="cuda-a tenth in HBM", marks=NEEDS_GPU),
    ],
)
def test_rows_of_a_model(device, hbm_share, optimizer):
    adagrad = optimizer == "rowwise_adagrad"
    made = RowWiseAdagrad(eps=EPS) if adagrad else SGD()
    specs = []
    for number, dim in enumerate(DIMS):
        limit = None
        if hbm_share is not None:
            limit = hbm_bytes_for(hbm_share, CAPACITY, dim, made.state_width(dim))
        specs.append(
            TableSpec(f"t{number}", CAPACITY, dim, "lru", limit, initializer=Uniform(-1, 1))
        )
    group = TableGroup(specs, list(range(FEATURES)), made, device=device)
    steps = draw_steps()
    Trainer(group).run(steps)
    model = RowStream(specs, LEARNING_RATE, EPS if adagrad else None)
    model.find_or_insert(steps[0].keys, steps[0].slots.tolist())
    for number, step in enumerate(steps):
        if number + 1 < len(steps):
            following = steps[number + 1]
            model.find_or_insert(following.keys, following.slots.tolist())
        compare_step(model, step)
    counters = group.counters()
    assert sum(table["inserted"] for table in counters) == model.inserted
    assert sum(table["refused"] for table in counters) == model.refused
    assert sum(table["evicted"] for table in counters) == model.evicted > 10 * STEPS
    if hbm_share is not None:
        assert all(table["written_back"] > STEPS for table in counters)
    for number in range(FEATURES):
        state = group.export_table(number)
        at = state.occupied.nonzero().flatten().cpu()
        ids = [(number, id_) for id_ in state.ids.cpu()[at].tolist()]
        assert set(ids) == {key for key in model.rows if key[0] == number}
        rows = state.rows.cpu()[at]
        expected = torch.stack([model.rows[key] for key in ids])
        if not adagrad:
            assert torch.equal(rows, expected)
            continue
        torch.testing.assert_close(rows.double(), expected, rtol=1e-5, atol=1e-5)
        squares = torch.tensor([model.squares[key] for key in ids], dtype=torch.float64)
        torch.testing.assert_close(
            state.states.cpu()[at, 0].double(), squares, rtol=1e-5, atol=1e-6
        )
