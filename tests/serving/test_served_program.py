"""A served program gives the outputs of ``ExportedProgram.module()``, and checks its inputs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torchrec_hkv.serving.served_program import ServedProgram

HANDLE = torch.zeros(1, dtype=torch.int64)


class Nested(nn.Module):
    """Nested outputs; parameters with two names, a buffer, a constant, views of views."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("unsaved", torch.randn(4), persistent=False)
        self.constant = torch.randn(4)

    def forward(self, handle, dense, lengths):
        flat = lengths.view(-1)
        again = flat.view(lengths.shape[0], -1)
        scores = self.second(self.first(dense - self.mean).relu()) * self.unsaved + self.constant
        some = torch.cond(dense.sum() > 0, lambda x: x + 1, lambda x: x - 1, (dense,))
        return {"scores": scores, "parts": [again * 2, (flat + 1, some)]}


class Leaf(nn.Module):
    def forward(self, handle, dense, lengths):
        return dense.sum(1) + lengths[0]


class Conditions(nn.Module):
    """Takes an even number of samples, at most 100."""

    def forward(self, handle, dense, lengths):
        torch._check(lengths.shape[1] <= 100)
        return dense.view(2, -1).sum(1)


def exported(module, samples=6):
    inputs = HANDLE, torch.randn(samples, 4), torch.ones(2, samples, dtype=torch.int64)
    auto = torch.export.Dim.AUTO
    return torch.export.export(
        module.eval(), inputs, dynamic_shapes=({}, {0: auto}, {1: auto}), strict=False
    ).run_decompositions({})


def served(module):
    return ServedProgram(exported(module), ["dense", "lengths"])


def batch(samples):
    return [torch.randn(samples, 4), torch.randint(0, 9, (2, samples))]


@pytest.mark.parametrize("kind", [Nested, Leaf])
def test_same_outputs(kind):
    reference = exported(kind())
    program = ServedProgram(reference, ["dense", "lengths"])
    module = reference.module()
    for samples in (1, 6, 9):
        inputs = batch(samples)
        got, want = program(HANDLE, inputs), module(HANDLE, *inputs)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert type(got) is type(want)


def test_other_state():
    module = Nested()
    program, inputs = served(copy.deepcopy(module)), batch(3)
    before = program(HANDLE, inputs)
    assert set(program.state) == set(module.state_dict())
    with torch.no_grad():
        for tensor in (*module.parameters(), module.mean):
            tensor.copy_(torch.randn_like(tensor))
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    changed = program.with_state(state)
    got = changed(HANDLE, inputs)
    torch.testing.assert_close(got, module(HANDLE, *inputs))
    torch.testing.assert_close(program(HANDLE, inputs), before, rtol=0, atol=0)
    for tensor in state.values():
        tensor.zero_()  # they were copied
    torch.testing.assert_close(changed(HANDLE, inputs), got, rtol=0, atol=0)


def test_refused_inputs():
    program = served(Leaf())
    dense, lengths = batch(5)
    for inputs, kind, message in (
        ([dense.double(), lengths], TypeError, "dense is of dtype torch.float64, but must be of"),
        ([dense, lengths.int()], TypeError, "lengths is of dtype torch.int32, but must be of"),
        ([dense[:, :3], lengths], ValueError, r"dense has shape \(5, 3\), but must have shape \["),
        ([dense[0], lengths], ValueError, r"dense has shape \(4,\), but must have shape \[\*, 4\]"),
        (
            [dense, lengths[:, 1:]],
            ValueError,
            r"dense and lengths don't fit: the sizes 5 and 4 must be equal",
        ),
    ):
        with pytest.raises(kind, match=message):
            program(HANDLE, inputs)


def test_conditions_of_the_program():
    program = served(Conditions())
    assert program(HANDLE, batch(8)).shape == (2,)
    with pytest.raises((ValueError, RuntimeError)):
        program(HANDLE, batch(102))
