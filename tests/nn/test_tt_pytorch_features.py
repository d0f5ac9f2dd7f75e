"""Tensor-Train modules under autocast, GradScaler, schedulers, torch.save and DDP."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from torchrec_hkv import OptimType, TTEmbeddingBag
from torchrec_hkv.nn import TableBatchedTTEmbeddingBag
from torchrec_hkv.tensor_train import make_shape

ROWS, DIM = 60, 8


def make(kind, device, sparse=False, **arguments):
    torch.manual_seed(3)
    if kind == "one":
        return TTEmbeddingBag(ROWS, DIM, 4, sparse=sparse, device=device, **arguments)
    shapes = [make_shape(ROWS, DIM, ranks=4), make_shape(ROWS, 4, ranks=3)]
    return TableBatchedTTEmbeddingBag(shapes, sparse=sparse, device=device, **arguments)


def bags(kind, device, seed=0, ids=24):
    """Ids and offsets in the module's format."""
    generator = torch.Generator().manual_seed(seed)
    tables = 1 if kind == "one" else 2
    drawn = torch.randint(0, ROWS, (ids * tables,), generator=generator)
    offsets = torch.arange(0, ids * tables + 1, 4)
    return drawn.to(device), (offsets[:-1] if kind == "one" else offsets).to(device)


def cores_of(module):
    return [core.detach().cpu().clone() for core in module.tt_cores]


KINDS = pytest.mark.parametrize("kind", ["one", "batched"])


@KINDS
@pytest.mark.parametrize("sparse", [False, True])
def test_rows_are_float32_under_autocast(kind, sparse, device_type):
    module = make(kind, device_type, sparse)
    plain = module(*bags(kind, device_type))
    with torch.autocast(device_type, dtype=torch.bfloat16):
        out = module(*bags(kind, device_type))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-6)


@KINDS
def test_scaled_gradients_train_as_unscaled_ones(kind, device_type):
    scaled, plain = make(kind, device_type), make(kind, device_type)
    optimizers = [torch.optim.Adagrad(each.parameters(), lr=0.1) for each in (scaled, plain)]
    scaler = torch.amp.GradScaler(device_type, init_scale=2.0**10)
    before = cores_of(scaled)
    for step in range(4):
        loss = scaled(*bags(kind, device_type, step)).square().sum()
        optimizers[0].zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[1].zero_grad()
        plain(*bags(kind, device_type, step)).square().sum().backward()
        optimizers[1].step()
    assert not torch.equal(cores_of(scaled)[0], before[0])
    for one, other in zip(cores_of(scaled), cores_of(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@KINDS
def test_schedules(kind, device_type):
    module, twin = make(kind, device_type), make(kind, device_type)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    for step in range(3):
        optimizer.zero_grad()
        module(*bags(kind, device_type, step)).sum().backward()
        optimizer.step()
        schedule.step()
        loss = twin(*bags(kind, device_type, step)).sum()
        gradients = torch.autograd.grad(loss, list(twin.tt_cores))
        for core, gradient in zip(twin.tt_cores, gradients, strict=True):
            core.data -= 0.5 * 0.1**step * gradient
    for one, other in zip(cores_of(module), cores_of(twin), strict=True):
        torch.testing.assert_close(one, other)


@KINDS
@pytest.mark.parametrize("how", ["deepcopy", "torch.save", "state_dict"])
@pytest.mark.parametrize("kind_of_optimizer", [OptimType.SGD, OptimType.ADAM])
def test_copies_continue_alike(kind, how, kind_of_optimizer, device_type):
    def train(module, seed):
        for step in range(3):
            module(*bags(kind, device_type, seed + step)).square().sum().backward()

    def fused():
        arguments = {"optimizer": kind_of_optimizer, "learning_rate": 0.05, "eps": 0.01}
        return make(kind, device_type, True, **arguments)

    module = fused()
    train(module, 0)
    if how == "deepcopy":
        other = copy.deepcopy(module)
    elif how == "torch.save":
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = fused()
        other.load_state_dict(module.state_dict())
    saved = cores_of(module)
    train(module, 10)
    assert all(map(torch.equal, cores_of(other), saved))  # apart from each other
    train(other, 10)
    for one, two in zip(cores_of(module), cores_of(other), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def _trained_under_ddp(rank, world_size, device, kind):
    """The distance of the cores from those of one process with all ids."""
    wrapped = DistributedDataParallel(make(kind, device))
    alone = make(kind, device)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (wrapped, alone)]
    for step in range(3):
        parts = [bags(kind, device, 10 * step + other) for other in range(world_size)]
        for each in optimizers:
            each.zero_grad()
        wrapped(*parts[rank]).square().sum().backward()
        (sum(alone(*part).square().sum() for part in parts) / world_size).backward()
        for each in optimizers:
            each.step()
    pairs = zip(cores_of(wrapped.module), cores_of(alone), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


@KINDS
def test_ddp_trains_returned_gradients(kind, run_ranks):
    assert all(difference < 1e-5 for difference in run_ranks(2, _trained_under_ddp, kind))


def _refused_under_ddp(rank, world_size, device, kind, arguments):
    module = make(kind, device, **arguments)
    model = torch.nn.ModuleDict({"tt": module, "dense": torch.nn.Linear(1, 1).to(device)})
    model.forward = lambda ids, offsets: module(ids, offsets)
    before = cores_of(module)
    try:
        DistributedDataParallel(model)(*bags(kind, device)).sum().backward()
    except RuntimeError as error:
        return str(error), all(map(torch.equal, cores_of(module), before))
    return "", False


@KINDS
def test_ddp_with_fused_updates_is_refused(kind, run_ranks):
    for sentence, unchanged in run_ranks(2, _refused_under_ddp, kind, {"sparse": True}):
        assert "make the module with sparse=False" in sentence
        assert unchanged


def test_ddp_with_a_cache_is_refused(run_ranks):
    arguments = {"use_cache": True, "cache_size": 5}
    for sentence, unchanged in run_ranks(2, _refused_under_ddp, "one", arguments):
        assert "make the module with use_cache=False" in sentence
        assert unchanged


def _train(module, kind, device, steps):
    for seed in range(steps):
        module(*bags(kind, device, seed)).square().sum().backward()
        if not module.tables.is_fused:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None


@KINDS
@pytest.mark.parametrize("sparse", [False, True])
def test_cores_become_bfloat16_and_the_rest_stays(kind, sparse, device_type):
    arguments = {"optimizer": OptimType.ADAGRAD} if sparse else {}
    module = make(kind, device_type, sparse, **arguments)
    _train(module, kind, device_type, 2)
    states = [state.clone() for state in module.tables.states]
    module.to(torch.bfloat16)
    assert {core.dtype for core in module.tt_cores} == {torch.bfloat16}
    assert module.tables.learning_rate.dtype == torch.float32
    for state, before in zip(module.tables.states, states, strict=True):
        assert torch.equal(state, before)
    before = cores_of(module)
    _train(module, kind, device_type, 2)
    assert not all(map(torch.equal, before, cores_of(module)))
    assert {core.dtype for core in module.float().tt_cores} == {torch.float32}
    _train(module, kind, device_type, 2)


@pytest.mark.parametrize("sparse", [False, True])
def test_cached_rows_stay_float32_beside_cores_of_bfloat16(sparse, device_type):
    cache = {"use_cache": True, "cache_size": 8, "cache_populate_every": 2}
    module = make("one", device_type, sparse, optimizer=OptimType.ADAGRAD, **cache)
    _train(module, "one", device_type, 5)
    rows = module.hot_rows.rows.detach().clone()
    module.bfloat16()
    assert torch.equal(module.hot_rows.rows, rows)
    _train(module, "one", device_type, 5)
    assert module.full_weight().isfinite().all()


@KINDS
@pytest.mark.parametrize("change", ["half", "double"])
def test_cores_of_other_dtypes_are_refused(kind, change, device_type):
    module = make(kind, device_type, sparse=True, optimizer=OptimType.ADAGRAD)
    with pytest.raises(TypeError, match=r"can't be made torch.float\d\d: they are float32 or"):
        getattr(module, change)()
    _train(module, kind, device_type, 2)
