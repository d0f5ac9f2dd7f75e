"""Two replicas that exchange messages directly get, bit for bit, the results of collective
calls."""

from __future__ import annotations

import pytest
import torch

from tests.support.thread_wire import ThreadWire, in_threads
from torchrec_hkv.hash_table import Adam, AgedLFU, RowWiseAdagrad, TableGroup, TableSpec, Uniform
from torchrec_hkv.hash_table.replicas import GroupSync

POLICIES = ("lru", "lfu", AgedLFU(0.7), "epoch_lru", "epoch_lfu", "customized")


class _Pair:
    """Two replicas of tables of different sizes, widths and dtypes."""

    def __init__(self, policy, optimizer, dtype, swaps: bool, device: str) -> None:
        self.policy, self.device = policy, device
        shapes = ((40, 3), (700, 16), (2000, 33), (300, 64))
        specs = [
            TableSpec(
                f"t{t}",
                capacity,
                dim,
                policy,
                initializer=Uniform(-1, 1),
                initial_capacity=20 if t == 2 else None,
                dtype=dtype,
            )
            for t, (capacity, dim) in enumerate(shapes)
        ]
        self.tables = range(len(specs))
        self.groups = [TableGroup(specs, [*self.tables], optimizer, device) for _ in range(2)]
        wires = ThreadWire.make(2, swaps)
        self.syncs = [
            GroupSync(group, [*self.tables], wire, batch_bytes=1 << 16)
            for group, wire in zip(self.groups, wires, strict=True)
        ]

    def train(self, replica: int, ids: list[torch.Tensor], scale: float) -> None:
        offsets = torch.tensor([0, *map(len, ids)], device=self.device).cumsum(0)
        joined = torch.cat(ids).to(self.device)
        scores = (joined % 97) if self.policy == "customized" else None
        anchor = torch.empty(0, device=self.device, requires_grad=True)
        rate = torch.full((), 0.1, device=self.device)
        group = self.groups[replica]
        out = group.train_lookup(anchor, joined, offsets, None, 1, False, rate, scores=scores)
        columns = torch.arange(out.numel(), device=self.device).view_as(out)
        out.backward((columns % 7 - 3) * scale)

    def sync(self, states: bool) -> list:
        return in_threads([lambda sync=sync: sync.sync(states) for sync in self.syncs])

    def contents(self) -> list[dict]:
        """Entries by id, for each table of each replica."""
        return [_by_id(group.export_table(t)) for group in self.groups for t in self.tables]


def _by_id(state) -> dict[int, bytes]:
    slots = state.occupied.nonzero().flatten()
    parts = [state.rows, state.states, state.last_steps.view(-1, 1)]
    if state.scores.numel():
        parts.append(state.scores.view(-1, 1))
    columns = [part[slots].cpu().contiguous() for part in parts if part.numel()]
    flat = [part.view(torch.uint8).reshape(len(slots), -1) for part in columns]
    values = torch.cat(flat, dim=1).numpy()
    ids = state.ids[slots].tolist()
    return {id_: row.tobytes() for id_, row in zip(ids, values, strict=True)}


def _check(policy, optimizer, dtype) -> None:
    pairs = [_Pair(policy, optimizer, dtype, swaps, "cpu") for swaps in (False, True)]
    maximum = (30, 400, 900, 150)  # distinct ids; tables have room for all of them
    for round_ in range(3):
        for replica in (0, 1, 1):
            ids = [torch.randint(n, (int(torch.randint(2 * n, ())),)) for n in maximum]
            scale = float(torch.rand(()))
            for pair in pairs:
                pair.train(replica, ids, scale)
        done = [pair.sync(states=round_ != 1) for pair in pairs]
        for one, other in zip(*done, strict=True):
            assert (one.touched, one.erased, one.lost) == (other.touched, other.erased, other.lost)
        wanted, found = (pair.contents() for pair in pairs)
        assert found == wanted


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_policies(policy):
    _check(policy, RowWiseAdagrad(), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("step_mode", ["global", "row"])
def test_types_of_rows(step_mode, dtype):
    _check("lfu", Adam(step_mode=step_mode), dtype)
