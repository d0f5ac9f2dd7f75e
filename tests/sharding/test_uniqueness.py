"""Ids that a user declares unique are sent unchanged, and refused if they repeat."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.models import shard_model
from torchrec_hkv import ParameterConstraints
from torchrec_hkv.sharding import BackendEmbeddingBagCollectionSharder as Bags
from torchrec_hkv.sharding import BackendEmbeddingCollectionSharder as Sequences
from torchrec_hkv.sharding.dists.index_dedup import deduplicate

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(torch.nn.Module):
    """Concatenates the rows of both features."""

    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingConfig(name=n, num_embeddings=500, embedding_dim=4, feature_names=[f"f_{n}"])
            for n in ("t", "s")
        ]
        self.ec = EmbeddingCollection(tables=tables, device=torch.device("meta"))
        apply_optimizer_in_backward(torch.optim.SGD, self.ec.parameters(), {"lr": 0.1})

    def forward(self, features):
        rows = self.ec(features)
        return torch.cat([rows["f_t"].values(), rows["f_s"].values()])


def _shard(world_size, device, arguments, kernels=("hkv", "hkv")):
    constraints = {
        name: ParameterConstraints(compute_kernels=[kernel], sharding_types=["row_wise"])
        for name, kernel in zip(("t", "s"), kernels, strict=True)
    }
    return shard_model(Model(), constraints, world_size, device, [Sequences(**arguments)])


def _features(t, s, device):
    values = torch.tensor([*t, *s], device=device)
    lengths = torch.tensor([len(t), 0, len(s), 0], device=device)
    return KeyedJaggedTensor(["f_t", "f_s"], values, lengths=lengths)


def _steps(rank, world_size, device, arguments):
    model = _shard(world_size, device, arguments)
    outputs = []
    for step in range(3):
        first = 100 * step
        # Ids of table t are distinct within a rank, but shared by ranks; table s has repeats.
        t = [first + i for i in (5, 3, 9, 2**40 + rank)]
        output = model(_features(t, [7, 7, first, 7], device))
        output.square().sum().backward()
        outputs.append(output.detach().cpu())
    return outputs


def test_rows_are_the_same_where_ids_are_sent_as_they_are(run_ranks):
    expected = run_ranks(2, _steps, {"use_index_dedup": True})
    for told in ({"unique": ["t"]}, {"unique": ["t"], "check_unique": True}):
        results = run_ranks(2, _steps, {"use_index_dedup": True, **told})
        for one, other in zip(expected, results, strict=True):
            torch.testing.assert_close(one, other)


def test_unique_tables_are_not_searched_for_repeats():
    features = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([4, 2, 4, 9, 9]), lengths=torch.tensor([2, 1, 2, 0])
    )
    reduced, places = deduplicate(features, [1, 1], [True, False])
    # The declaration is not checked: the repeated id is sent twice.
    assert reduced.values().tolist() == [4, 2, 4, 9]
    assert reduced.lengths().tolist() == [3, 0, 1, 0]
    assert reduced.values()[places].tolist() == features.values().tolist()


def _refused(rank, world_size, device, arguments, t):
    model = _shard(world_size, device, arguments)
    with pytest.raises(
        ValueError, match="Table 't' was declared to have no repeated id"
    ) as refusal:
        model(_features(t, [1, 1], device))
    return str(refusal.value)


def test_a_repeat_in_a_batch(run_ranks, device_type):
    if device_type == "cuda":
        pytest.skip("an assertion on the device ends the process")
    (message,) = run_ranks(1, _refused, {"unique": ["t"], "check_unique": True}, [4, 2**50, 2**50])
    assert f"in a batch of a rank, but has id {2**50} more than once" in message


def test_a_repeat_over_ranks(run_ranks, device_type):
    if device_type == "cuda":
        pytest.skip("an assertion on the device ends the process")
    # Ids are distinct on each rank but equal on both: only the shard sees the repeats.
    told = {"shard_unique": ["t"], "unique": ["t"], "check_unique": True}
    results = run_ranks(2, _refused_on_a_shard, told)
    assert (
        sum("in a lookup of a shard, but has id 3 more than once" in said for said in results) == 1
    )


def _refused_on_a_shard(rank, world_size, device, arguments):
    model = _shard(world_size, device, arguments)
    module = model.module.ec
    context = module.create_context()
    received = module.input_dist(context, _features([3, 100 + rank], [1, 1], device)).wait().wait()
    try:
        module.compute(context, received)
    except ValueError as error:
        return str(error)
    return ""


def test_shards_without_repeats_are_looked_up(run_ranks):
    (outputs,) = run_ranks(1, _steps, {"shard_unique": ["t"], "use_index_dedup": True})
    assert len(outputs) == 3


def _impossible(rank, world_size, device, arguments, kernels):
    with pytest.raises(ValueError, match="unique") as refusal:
        _shard(world_size, device, arguments, kernels)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"unique": ["z"], "check_unique": True}, "unique names ['z'], but the collection has"),
        ({"shard_unique": ["s"]}, "has tables on backends ['t']"),
        ({"unique": True}, "only has an effect with use_index_dedup or check_unique"),
    ],
)
def test_refused(run_ranks, arguments, message):
    (said,) = run_ranks(1, _impossible, arguments, ("hkv", "fused"))
    assert message in said


def test_true_or_false_by_table():
    told = {"t": True, "s": False}
    sharder = Sequences(use_index_dedup=True, unique=told, shard_unique=told)
    for has in (sharder._uniqueness.has_unique, sharder._uniqueness.has_shard_unique):
        assert has("t")
        assert not has("s")
        assert not has("other")
    with pytest.raises(ValueError, match="unique of table 't' is 'yes': it must be True or False"):
        Sequences(use_index_dedup=True, unique={"t": "yes"})


def test_environment(monkeypatch):
    monkeypatch.setenv("TORCHREC_HKV_EMB_UNIQUE", "1")
    monkeypatch.setenv("TORCHREC_HKV_EMB_SHARD_UNIQUE", "true")
    assert Sequences(use_index_dedup=True)._uniqueness.has_unique("t")
    assert Sequences()._uniqueness.has_shard_unique("t")
    assert not Bags()._uniqueness.has_unique("t")
    assert not Bags(shard_unique=False)._uniqueness.has_shard_unique("t")
    monkeypatch.setenv("TORCHREC_HKV_EMB_UNIQUE", "maybe")
    with pytest.raises(ValueError, match="TORCHREC_HKV_EMB_UNIQUE is 'maybe', but must be 0, 1"):
        Sequences(use_index_dedup=True)
