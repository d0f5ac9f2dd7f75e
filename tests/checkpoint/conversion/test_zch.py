"""Conversion keeps the ids that TorchRec's managed collision modules mapped to rows, with scores
and steps."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.modules import mc_modules
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

from tests.support.conversions import converted, entries_of

ROWS, DIM = 64, 4
CPU = torch.device("cpu")
POLICIES = {
    "lru": mc_modules.LRU_EvictionPolicy,
    "lfu": mc_modules.LFU_EvictionPolicy,
    "distance_lfu": mc_modules.DistanceLFU_EvictionPolicy,
}
MODULE = "m._managed_collision_collection._managed_collision_modules.user."
WEIGHT = "m._embedding_module.embedding_bags.user.weight"


def _model(module):
    config = EmbeddingBagConfig(
        name="user", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["user"]
    )
    bags = EmbeddingBagCollection([config], device=CPU)
    modules = mc_modules.ManagedCollisionCollection({"user": module}, [config])
    collection = ManagedCollisionEmbeddingBagCollection(bags, modules)
    return torch.nn.ModuleDict({"m": collection})


def _module(policy):
    return mc_modules.MCHManagedCollisionModule(
        zch_size=ROWS, device=CPU, eviction_policy=POLICIES[policy](), eviction_interval=1
    )


def _train(module, ids, steps=12):
    """Runs the module's forward. Few ids evict none, many do."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        drawn = ids[torch.randint(0, len(ids), (20,), generator=generator)]
        module({"user": JaggedTensor(drawn, lengths=torch.ones(20, dtype=torch.int64))})


def _check(saved, module, weight, ids):
    """Every id that the module knows has its row, and no other id has a row."""
    found = entries_of(saved, "user")
    known = set(module._mch_sorted_raw_ids.tolist()) - {torch.iinfo(torch.int64).max}
    assert set(found["ids"].tolist()) == known
    assert len(known) > 20
    feature = JaggedTensor(found["ids"], lengths=torch.ones(len(known), dtype=torch.int64))
    rows = module.remap({"user": feature})["user"].values()
    assert found["rows"].equal(weight[rows])
    return found


@pytest.mark.parametrize("ids", [40, 200])
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_scores_and_steps(tmp_path, policy, ids):
    model = _model(_module(policy))
    model["m"].train()
    raw = torch.randint(-(2**62), 2**62, (ids,))
    for _step in range(12):
        drawn = raw[torch.randint(0, ids, (20,))]
        lengths = torch.ones(20, dtype=torch.int64)
        model["m"](KeyedJaggedTensor(keys=["user"], values=drawn, lengths=lengths))
    state = {"model": model.state_dict(), "epoch": 3}
    dcp.save(state, checkpoint_id=tmp_path / "zch", no_dist=True)
    saved = converted(tmp_path / "zch", tmp_path / "hkv")
    assert list(saved.tables) == ["m.embedding_bags.user"]
    module = model["m"]._managed_collision_collection._managed_collision_modules["user"]
    found = _check(saved, module, state["model"][WEIGHT], raw)
    known = module._mch_sorted_raw_ids.tolist()
    at = torch.tensor([known.index(id_) for id_ in found["ids"].tolist()])
    table = saved.hash_table("user").parts[0].manifest
    if policy != "lru":
        assert found["scores"].equal(module._mch_counts[at])
    if policy != "lfu":
        ages = table.clock - found["last_steps"]
        assert ages.equal(module._mch_last_access_iter[at].max() - module._mch_last_access_iter[at])
    else:
        assert (found["last_steps"] == table.clock).all()


def test_modules_of_several_ranks(tmp_path):
    whole = _module("lfu")
    halves = [
        whole.rebuild_with_output_id_range((begin, begin + ROWS // 2), [0, ROWS // 2, ROWS])
        for begin in (0, ROWS // 2)
    ]
    raw = torch.randint(-(2**62), 2**62, (60,))
    for half, ids in zip(halves, raw.chunk(2), strict=True):
        _train(half, ids)
    names = ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_mch_counts")
    # TorchRec's sharded modules store their parts like this.
    state = {MODULE + n: torch.cat([half.state_dict()[n] for half in halves]) for n in names}
    weight = torch.randn(ROWS, DIM)
    dcp.save({**state, WEIGHT: weight}, checkpoint_id=tmp_path / "zch", no_dist=True)
    found = entries_of(converted(tmp_path / "zch", tmp_path / "hkv"), "user")
    for half in halves:
        mine = torch.isin(found["ids"], half._mch_sorted_raw_ids)
        feature = JaggedTensor(
            found["ids"][mine], lengths=torch.ones(int(mine.sum()), dtype=torch.int64)
        )
        rows = half.remap({"user": feature})["user"].values()
        assert mine.any()
        assert found["rows"][mine].equal(weight[rows])
    assert len(found["ids"]) == sum(
        int((half._mch_sorted_raw_ids != torch.iinfo(torch.int64).max).sum()) for half in halves
    )


def test_hashed_identities(tmp_path):
    module = HashZchManagedCollisionModule(
        zch_size=ROWS, device=CPU, total_num_buckets=1, max_probe=ROWS
    ).eval()

    def rows(ids):
        lengths = torch.ones(len(ids), dtype=torch.int64)
        return module.remap({"user": JaggedTensor(ids, lengths=lengths)})["user"].values()

    # The module does not train on a CPU: the test writes ids where a lookup starts, and finds them
    # there.
    ids = torch.randint(0, 2**62, (30,))
    places, first = {}, rows(ids)
    for id_, row in zip(ids.tolist(), first.tolist(), strict=True):
        places.setdefault(row, id_)
    with torch.no_grad():
        for row, id_ in places.items():
            module._hash_zch_identities[row] = id_
    kept = torch.tensor(sorted(places.values()))
    state = {f"{MODULE}_hash_zch_identities": module._hash_zch_identities.detach()}
    weight = torch.randn(ROWS, DIM)
    dcp.save({**state, WEIGHT: weight}, checkpoint_id=tmp_path / "zch", no_dist=True)
    found = entries_of(converted(tmp_path / "zch", tmp_path / "hkv"), "user")
    assert found["ids"].equal(kept)
    assert found["rows"].equal(weight[rows(kept)])


def test_contradictions(tmp_path):
    module = _module("lru")
    _train(module, torch.arange(30))
    state = {MODULE + name: value for name, value in module.state_dict().items()}
    cases = {
        "but not its rows": (state, {}),
        "have the same row": (state, {WEIGHT: torch.randn(ROWS, DIM)}),
        "but the table has rows 0 to 19": (copy.deepcopy(state), {WEIGHT: torch.randn(20, DIM)}),
    }
    state[f"{MODULE}_mch_remapped_ids_mapping"] = torch.full((ROWS,), 3)
    for index, (sentence, (tensors, weight)) in enumerate(cases.items()):
        dcp.save({**tensors, **weight}, checkpoint_id=tmp_path / f"{index}", no_dist=True)
        with pytest.raises(ValueError, match=sentence):
            converted(tmp_path / f"{index}", tmp_path / "hkv")
        assert not (tmp_path / "hkv").exists()
