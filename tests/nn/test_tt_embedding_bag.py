"""TTEmbeddingBag takes the arguments of nn.EmbeddingBag, and equals it on the dense table."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support import tensor_train as tt
from torchrec_hkv import OptimType, TTEmbeddingBag
from torchrec_hkv.nn import TableBatchedTTEmbeddingBag
from torchrec_hkv.tensor_train import make_shape

ROWS, DIM = 300, 12


def make(device="cpu", **arguments):
    bag = TTEmbeddingBag(ROWS, DIM, **{"tt_ranks": 5, "sparse": False, **arguments})
    return bag.to(device)


def dense_twin(bag, cores):
    """nn.EmbeddingBag in float64 whose weight is a function of the cores."""
    weight = tt.dense_table(bag.shape, cores)

    def call(input, offsets=None, weights=None):
        if bag.mode == "mean" and weights is not None:
            raise NotImplementedError
        return nn.functional.embedding_bag(
            input.long(),
            weight,
            None if offsets is None else offsets.long(),
            mode=bag.mode,
            per_sample_weights=None if weights is None else weights.double(),
            include_last_offset=bag.include_last_offset,
        )

    return call


def absolute(tensor):
    """Absolute values in float64, a leaf if the tensor is one: sums without cancellation."""
    if tensor is None or not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().abs().requires_grad_(tensor.requires_grad)


def check(bag, *args):
    cores = list(bag.tt_cores)
    out, expected = bag(*args), dense_twin(bag, cores)(*args)
    absolute_cores, absolute_args = list(map(absolute, cores)), list(map(absolute, args))
    largest = dense_twin(bag, absolute_cores)(*absolute_args)
    tt.assert_near(out, expected, magnitude=largest)

    def inputs_of(cores, args):
        return [*cores, *(a for a in args if a is not None and a.requires_grad)]

    grad = torch.randn_like(out)
    actual = torch.autograd.grad(out, inputs_of(cores, args), grad)
    wanted = torch.autograd.grad(expected, inputs_of(cores, args), grad.double())
    sizes = torch.autograd.grad(
        largest, inputs_of(absolute_cores, absolute_args), grad.double().abs()
    )
    for one, other, size in zip(actual, wanted, sizes, strict=True):
        tt.assert_near(one, other, magnitude=size)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(0, 6), min_size=1, max_size=9),
    st.sampled_from(["sum", "mean"]),
    st.booleans(),
    st.sampled_from([torch.int64, torch.int32]),
)
def test_one_dimensional_input(device_type, seed, lengths, mode, last, dtype):
    torch.manual_seed(seed)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(0, ROWS, (int(ends[-1]),)).to(device_type, dtype)
    bag = make(device_type, mode=mode, include_last_offset=last)
    offsets = (ends if last else ends[:-1]).to(device_type, dtype)
    check(bag, ids, offsets)
    if mode == "sum":
        weights = torch.randn(ids.numel(), device=device_type, requires_grad=True)
        check(bag, ids, offsets, weights)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_two_dimensional_input(device_type, mode):
    bag = make(device_type, mode=mode)
    ids = torch.randint(0, ROWS, (7, 4), device=device_type)
    check(bag, ids)
    if mode == "sum":
        check(bag, ids, None, torch.randn(7, 4, device=device_type).requires_grad_())
    assert bag(ids[:0]).shape == (0, DIM)
    assert torch.equal(bag(ids[:, :0]).cpu(), torch.zeros(7, DIM))


def test_replaces_an_embedding_bag_in_training():
    torch.manual_seed(0)
    bag = make()
    twin = nn.EmbeddingBag.from_pretrained(bag.full_weight(), freeze=False, mode="sum")
    ids, offsets = torch.randint(0, ROWS, (50,)), torch.arange(0, 50, 5)
    torch.testing.assert_close(bag(ids, offsets), twin(ids, offsets), rtol=1e-4, atol=1e-6)
    optimizer = torch.optim.Adam(bag.parameters(), lr=0.01)
    target = torch.randn(10, DIM)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (bag(ids, offsets) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


# tests/tensor_train/test_fused_update.py covers row-wise Adagrad, which torch lacks.
@pytest.mark.parametrize("kind", [OptimType.SGD, OptimType.ADAGRAD, OptimType.ADAM])
def test_fused_equals_returned_gradients(device_type, kind):
    fused = make(device_type, sparse=True, optimizer=kind, learning_rate=0.05, eps=0.01)
    external = make(device_type)
    for one, other in zip(external.tt_cores, fused.tt_cores, strict=True):
        one.data.copy_(other)
    optimizer = {
        OptimType.SGD: lambda p: torch.optim.SGD(p, lr=0.05),
        OptimType.ADAGRAD: lambda p: torch.optim.Adagrad(p, lr=0.05, eps=0.01),
        # All slices occur below, so dense Adam equals Adam of the slices that occur.
        OptimType.ADAM: lambda p: torch.optim.Adam(p, lr=0.05, eps=0.01),
    }[kind](external.parameters())
    for _ in range(3):
        ids = torch.randperm(ROWS, device=device_type)
        offsets = torch.arange(0, ROWS, 3, device=device_type)
        grad = torch.randn(100, DIM, device=device_type)
        fused(ids, offsets).backward(grad)
        optimizer.zero_grad()
        external(ids, offsets).backward(grad)
        optimizer.step()
    for one, other in zip(external.tt_cores, fused.tt_cores, strict=True):
        tt.assert_near(other, one, 1e-4)


def test_evaluation_trains_nothing(device_type):
    bag = make(device_type, sparse=True).eval()
    before = [core.clone() for core in bag.tt_cores]
    weights = torch.randn(4, device=device_type, requires_grad=True)
    ids, zero = (torch.tensor(v, device=device_type) for v in ([1, 2, 3, 4], [0]))
    bag(ids, zero, weights).sum().backward()
    assert weights.grad is not None
    assert all(map(torch.equal, before, bag.tt_cores))


def test_learning_rate_is_live(device_type):
    bag = make(device_type, sparse=True, learning_rate=0.1)
    bag.set_learning_rate(0.0)
    before = [core.clone() for core in bag.tt_cores]
    ids = torch.tensor([1, 2], device=device_type)
    bag(ids, ids[:1] * 0).sum().backward()
    assert all(map(torch.equal, before, bag.tt_cores))
    bag.set_learning_rate(0.1)
    bag(ids, ids[:1] * 0).sum().backward()
    assert not torch.equal(before[0], bag.tt_cores[0])


@tt.on_devices
@pytest.mark.parametrize("make_one", [TTEmbeddingBag, None], ids=["one", "batched"])
def test_precision(device_type, precision, make_one):
    ids = torch.randint(0, ROWS, (60,), device=device_type)
    offsets = torch.arange(0, 60, 6, device=device_type)
    if make_one is None:
        shapes = [make_shape(ROWS, DIM, ranks=12)]
        module = TableBatchedTTEmbeddingBag(shapes, precision=precision, device=device_type)
        out = module(ids, torch.cat([offsets, offsets.new_full((1,), 60)]))
        shape, group = shapes[0], module.tables.group
    else:
        module = make_one(ROWS, DIM, 12, precision=precision, device=device_type)
        out, shape, group = module(ids, offsets), module.shape, module.tables.group
    assert group.precision == copy.deepcopy(group).precision == precision
    rows = tt.dense_table(shape, list(module.tt_cores))[ids]
    tt.assert_within(out, rows.reshape(10, 6, DIM).sum(dim=1), precision)


def test_a_cpu_refuses_tf32():
    ids = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="precision is 'tf32', but on a CPU it must be 'fp32'"):
        make(precision="tf32")(ids, ids[:1] * 0)
    with pytest.raises(ValueError, match="precision is 'half', but must be 'fp32' or 'tf32'"):
        make(precision="half")


@pytest.mark.parametrize("cache", [False, True])
def test_state_dict_and_copies_continue_alike(cache):
    torch.manual_seed(1)
    arguments = {"sparse": True, "optimizer": OptimType.ADAM}
    if cache:
        arguments |= {"use_cache": True, "cache_size": 20}

    def train(bag, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(3):
            ids = torch.randint(0, ROWS, (40,), generator=generator) // 4
            bag(ids, torch.arange(0, 40, 4)).square().sum().backward()
        if cache:
            bag.cache_populate()

    bag = make(**arguments)
    train(bag, 1)
    twin, copied = make(**arguments), copy.deepcopy(bag)
    twin.load_state_dict(bag.state_dict())
    for other in (bag, twin, copied):
        train(other, 2)
    assert torch.equal(bag.full_weight(), twin.full_weight())
    assert torch.equal(bag.full_weight(), copied.full_weight())


def test_ranks_by_ratio_and_bytes():
    bag = TTEmbeddingBag(100_000, 32, compression_ratio=50.0)
    assert bag.shape.compression_ratio >= 50
    bag = TTEmbeddingBag(100_000, 32, max_bytes=50_000, dtype=torch.bfloat16)
    assert sum(core.numel() for core in bag.tt_cores) * 2 <= 50_000
    assert bag(torch.tensor([5]), torch.tensor([0])).dtype == torch.float32


def test_reset_parameters():
    bag = make(sparse=True, optimizer=OptimType.ADAM)
    bag(torch.tensor([1, 2]), torch.tensor([0])).sum().backward()
    before = [core.clone() for core in bag.tt_cores]
    bag.tables.reset_parameters()
    assert all(not torch.equal(a, b) for a, b in zip(before, bag.tt_cores, strict=True))
    assert all(float(state.abs().sum()) == 0 for state in bag.tables.states)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"tt_ranks": [2, 2], "tt_p_shapes": [2, 2, 2]}, "must be at least num_embeddings, 300"),
        ({"tt_ranks": [2, 2], "tt_q_shapes": [2, 2, 2]}, "must be embedding_dim, 12"),
        ({"tt_ranks": [200, 2]}, "rank 1 can be at most"),
        ({"mode": "max"}, "mode is 'max', but must be 'sum' or 'mean'"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd', but must be one of OptimType.SGD"),
        ({"weight_dist": "zeros"}, "distribution is 'zeros'"),
        ({"cache_size": 5}, "use_cache is False"),
        ({"use_cache": True, "cache_size": 301}, "the cache has 301 rows, but must have 1 to 300"),
        ({"use_cache": True}, "the cache has 0 rows"),
        ({"use_cache": True, "cache_size": 9, "hashtbl_size": 8}, "at least as many"),
        ({"use_cache": True, "cache_size": 9, "cache_populate_every": 0}, "every is 0"),
        ({"dtype": torch.float16}, "dtype is torch.float16"),
        ({"tt_ranks": None}, "exactly one of ranks"),
    ],
)
def test_refused_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        TTEmbeddingBag(ROWS, DIM, **{"tt_ranks": 4, **arguments})


@pytest.mark.parametrize("name", ["cache_size", "hashtbl_size", "cache_populate_every"])
@pytest.mark.parametrize("value", [20.5, "20", True])
def test_sizes_of_a_cache_that_are_no_integers(name, value):
    arguments = {"use_cache": True, "cache_size": 9, name: value}
    with pytest.raises(TypeError, match=f"{name} is {value!r}, but must be an integer"):
        TTEmbeddingBag(ROWS, DIM, 4, **arguments)


@pytest.mark.parametrize("cache", [False, True])
def test_refused_inputs(cache):
    bag = make(**({"use_cache": True, "cache_size": 5} if cache else {}))
    ids = torch.tensor([1, 2, 3])
    zero = torch.tensor([0])
    for args, error, match in [
        ((ids,), ValueError, "offsets are missing"),
        ((ids[None], zero), ValueError, "2-D input has a bag a row"),
        ((ids[None, None],), ValueError, "must be 1-D or 2-D"),
        ((ids.float(), zero), TypeError, "input must be of dtype int32 or int64"),
        ((ids, zero.float()), TypeError, "offsets must be of dtype"),
        ((ids, zero + 1), ValueError, "offsets must begin with 0"),
        ((ids, torch.tensor([0, 4])), ValueError, "offsets must not decrease"),
        ((ids, zero, torch.ones(2)), ValueError, "per_sample_weights have shape"),
        ((torch.tensor([300]), zero), ValueError, "asked for id 300.*0 to 299"),
        ((torch.tensor([-1]), zero), ValueError, "asked for id -1"),
    ]:
        with pytest.raises(error, match=match):
            bag(*args)
    with pytest.raises(ValueError, match="has no cache"):
        make().cache_populate()
    assert not math.isnan(float(bag(ids, zero).sum()))


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf"), None, "fast"])
def test_refused_learning_rates(rate):
    with pytest.raises(ValueError, match=f"learning_rate is {rate!r}, but must be finite"):
        TTEmbeddingBag(ROWS, DIM, tt_ranks=4, learning_rate=rate)
    bag = TTEmbeddingBag(ROWS, DIM, tt_ranks=4, sparse=True, learning_rate=0.25)
    with pytest.raises(ValueError, match=f"learning_rate is {rate!r}, but must be finite"):
        bag.set_learning_rate(rate)
    assert bag.tables.learning_rate == 0.25
