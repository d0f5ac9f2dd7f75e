"""``state_dict`` keys distinguish tables of equal name in two collections."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.models import topology
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    checkpoint,
    get_default_sharders,
)
from torchrec_hkv.metrics import Watch, collect
from torchrec_hkv.sharding import table_counters
from torchrec_hkv.sharding.state.names import named_modules, named_tables

FULL = ["bags.embedding_bags.u", "deep.more.embedding_bags.u", "rows.embeddings.u"]
STOCK = "bags.embedding_bags.stock"


class Towers(nn.Module):
    """Three collections, each with a table ``u`` of feature ``u``."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        meta = torch.device("meta")
        of_bags = {"name": "u", "feature_names": ["u"], "num_embeddings": 160, "embedding_dim": 4}
        of_stock = {**of_bags, "name": "stock", "feature_names": ["s"]}
        self.bags = EmbeddingBagCollection(
            [EmbeddingBagConfig(**of_bags), EmbeddingBagConfig(**of_stock)], device=meta
        )
        self.deep = nn.ModuleDict(
            {"more": EmbeddingBagCollection([EmbeddingBagConfig(**of_bags)], device=meta)}
        )
        self.rows = EmbeddingCollection([EmbeddingConfig(**of_bags)], device=meta)
        if dense:
            self.over = nn.Linear(4, 1)  # DistributedModelParallel wraps it with DDP


def make(world_size, device, dense=False, kernel="hkv", **options):
    """A sharded model of :class:`Towers`."""
    model = Towers(dense)
    for collection in (model.bags, model.deep, model.rows):
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 1.0})
    constraints = {
        "u": ParameterConstraints(
            compute_kernels=[kernel],
            sharding_types=["table_wise"],
            options=HKVOptions(**options) if kernel == "hkv" else None,
        ),
        "stock": ParameterConstraints(compute_kernels=["fused"], sharding_types=["table_wise"]),
    }
    sharders = get_default_sharders()
    plan = EmbeddingShardingPlanner(
        topology=topology(world_size, device), constraints=constraints, batch_size=8
    ).collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, plan=plan, sharders=sharders, device=device)


def batch(ids, device, keys=("u",)):
    """A bag of ids for the first feature, empty bags for the others."""
    lengths = torch.tensor([len(ids), *[0 for _ in keys[1:]]])
    return KeyedJaggedTensor(list(keys), torch.tensor(ids, dtype=torch.int64), lengths=lengths).to(
        device
    )


def train(model, device, rank=0):
    """Trains on ids 1, 2 and 3 of each rank, shifted by collection."""
    inner = model.module
    first = 100 * rank
    bags = inner.bags(batch([first], device, ("u", "s"))).values()
    deep = inner.deep["more"](batch([first, first + 1], device)).values()
    rows = inner.rows(batch([first, first + 1, first + 2], device))["u"].values()
    (bags.sum() + deep.sum() + rows.sum()).backward()


def _results(rank, world_size, device, dense):
    model = make(world_size, device, dense)
    train(model, device, rank)
    sizes = {name: metrics.size for name, metrics in collect(model, dist.group.WORLD).items()}
    with Watch(model, 1, group=dist.group.WORLD) as watch:
        watch.step()
    watched = {name: metrics.size for name, metrics in watch.latest.items()}
    digest = checkpoint.digest(model)
    counted = {name: counts["size"] for name, counts in table_counters(model).items()}
    keys = {key.rpartition(".")[0] for key in model.state_dict()}
    return sizes, watched, digest, counted, keys


@pytest.mark.parametrize("dense", [False, True], ids=["bare", "wrapped by DDP"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_results_are_keyed_by_full_names(run_ranks, world_size, dense):
    results = run_ranks(world_size, _results, dense)
    expected = {name: (k + 1) * world_size for k, name in enumerate(FULL)}
    counted = dict.fromkeys(FULL, 0)
    for sizes, watched, digest, own, keys in results:
        assert sizes == watched == expected
        assert {name: int(value.split("-")[0]) for name, value in digest.items()} == expected
        assert set(FULL) < keys
        for name, size in own.items():
            counted[name] += size
    assert counted == expected


def _by_name(rank, world_size, device, dense):
    model = make(world_size, device, dense)
    train(model, device, rank)
    found = {}
    for name in (*FULL, STOCK, "stock"):
        ids = [ids for ids, _ in checkpoint.export_rows(model, name)]
        found[name] = sorted(torch.cat(ids).tolist())
    given = [(torch.tensor([7]), torch.ones(1, 4))]
    checkpoint.import_rows(model, FULL[1], given)
    refusals = []
    for work in (
        lambda: list(checkpoint.export_rows(model, "u")),
        lambda: checkpoint.import_rows(model, "u", given),
        lambda: list(checkpoint.export_rows(model, "embedding_bags.u")),
    ):
        with pytest.raises(ValueError, match="The model has") as refusal:
            work()
        refusals.append(str(refusal.value))
    return found, refusals, {k: v.split("-")[0] for k, v in checkpoint.digest(model).items()}


@pytest.mark.parametrize("dense", [False, True], ids=["bare", "wrapped by DDP"])
def test_arguments_are_full_names_or_unique_ones(run_ranks, dense):
    for found, (exported, imported, none), entries in run_ranks(2, _by_name, dense):
        assert found == {
            FULL[0]: [0, 100],
            FULL[1]: [0, 1, 100, 101],
            FULL[2]: [0, 1, 2, 100, 101, 102],
            STOCK: list(range(160)),
            "stock": list(range(160)),
        }
        assert exported == imported
        assert exported == (
            "The model has 3 tables 'u': use one of their full names, "
            f"{', '.join(map(repr, FULL))}."
        )
        assert none == (
            f"The model has no table 'embedding_bags.u': name one of {sorted([*FULL, STOCK])}."
        )
        assert list(entries.values()) == ["2", "5", "6"]


def _saved(rank, world_size, device, folder, dense):
    model, fresh = (make(world_size, device, dense) for _ in range(2))
    train(model, device, rank)
    checkpoint.save(folder, model)
    checkpoint.load(folder, fresh)
    return checkpoint.digest(model), checkpoint.digest(fresh)


@pytest.mark.parametrize("dense", [False, True], ids=["bare", "wrapped by DDP"])
def test_a_checkpoint_has_the_names_of_the_state_dict(run_ranks, tmp_path, dense):
    for saved, loaded in run_ranks(2, _saved, tmp_path / "c", dense):
        assert saved == loaded
        assert list(saved) == FULL
    names = sorted(path.name for path in (tmp_path / "c" / "tables").iterdir())
    assert names == sorted(FULL)


def _dense_rows(rank, world_size, device):
    """Tables whose rows have numbers are in the state_dict, too."""
    model = make(world_size, device, dense=True, kernel="tt")
    return [len(ids) for name in FULL[:2] for ids, _ in checkpoint.export_rows(model, name)]


def test_tables_in_the_state_dict_of_a_wrapped_model(run_ranks):
    assert run_ranks(1, _dense_rows) == [[160, 160]]


def _strict(rank, world_size, device):
    model = make(world_size, device, strict=True)
    with pytest.raises(RuntimeError, match="is strict and had no place") as refusal:
        model.module.deep["more"](batch(list(range(4000)), device))
    return str(refusal.value)


def test_a_strict_table_names_itself_in_full(run_ranks):
    (message,) = run_ranks(1, _strict)
    assert message.startswith(f"Table {FULL[1]!r} is strict and had no place for ")


def _row_numbers(rank, world_size, device):
    model = make(world_size, device, kernel="tt")
    with pytest.raises(ValueError, match="160") as refusal:
        model.module.deep["more"](batch([160], device))
    return str(refusal.value)


def test_a_tensor_train_table_names_itself_in_full(run_ranks, device_type):
    if device_type == "cuda":
        pytest.skip("only strict tables look at ids on a GPU")
    (message,) = run_ranks(1, _row_numbers)
    assert FULL[1] in message


def _paths(rank, world_size, device):
    model = make(world_size, device, dense=True)
    around = nn.ModuleDict({"trainer": model})
    keys = {key.rpartition(".")[0] for key in around.state_dict()}
    twice = nn.ModuleDict({"trainer": model, "twin": model})
    return (
        list(named_tables(around)),
        list(named_tables(twice)),
        keys,
        list(dict.fromkeys(path for path, _ in named_modules(around)))[:3],
    )


def test_a_sharded_model_within_another_module(run_ranks):
    ((names, once, keys, paths),) = run_ranks(1, _paths)
    assert names == once == [f"trainer.{name}" for name in FULL]
    assert set(names) < keys
    assert paths == ["", "trainer", "trainer.bags"]
