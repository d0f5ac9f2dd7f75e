"""Scores of all kinds of batches, evaluations without scores, and refusals."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

from tests.sharding.test_policies import check_held, held, kept_ids, make, train
from tests.support.models import make_model, shard_model
from tests.support.scored_model import (
    BATCH,
    FEATURES,
    Dictionary,
    ScoredCase,
    WithLoss,
    constraints,
    draw,
    to_kjt,
    total,
    unsharded,
)
from torchrec_hkv import (
    HKVOptions,
    ParameterConstraints,
    accumulate_gradients,
    set_epoch,
)
from torchrec_hkv.sharding import BackendEmbeddingBagCollectionSharder

pytestmark = pytest.mark.compat

BAGS = ScoredCase(("c", "w", "s"), "bags", "row_wise", 192)
SEQUENCES = ScoredCase(("c", "w", "s"), "sequences", "row_wise", 192)


def _score(entries):
    return {id_: score for id_, (_, score) in entries.items()}


def _evaluations(rank, world_size, device, case):
    model = make(case, world_size, device)
    dictionary = Dictionary(case, world_size)
    train(model, case, dictionary, rank, world_size, device, range(3))
    before = held(model)
    model.eval()
    features = to_kjt(case, draw(case, rank, 1), device)
    keys = [f for name in case.tables for f in FEATURES[name]]
    weights = features.weights_or_none() if case.kind == "weighted" else None
    at = torch.cat(
        [
            torch.arange(*features.offset_per_key()[i : i + 2])
            for i in map(features.keys().index, keys)
        ]
    ).to(device)
    without = KeyedJaggedTensor(
        keys=keys,
        values=features.values()[at],
        lengths=torch.cat([features[key].lengths() for key in keys]),
        weights=None if weights is None else weights[at],
    )
    with torch.no_grad():
        bare, full = model(without), model(features)
    for key in keys:
        assert torch.equal(bare[key], full[key])
    model.train()
    with torch.no_grad():
        model(features)
    assert held(model) == before


@pytest.mark.parametrize(
    "case", [BAGS, SEQUENCES, ScoredCase(("c", "w"), "weighted", "row_wise", 192)]
)
def test_evaluations_need_no_scores(run_ranks, case):
    run_ranks(2, _evaluations, case)


def _uneven(rank, world_size, device, case):
    """Rank 1 has one sample fewer; the dictionary treats it as an empty bag."""
    model = make(case, world_size, device)
    dictionary = Dictionary(case, world_size)
    for step in range(4):
        batches = [draw(case, other, step) for other in range(world_size)]
        for feature in batches[1].values():
            del feature.bags[-1]
        out = model(to_kjt(case, batches[rank], device))
        sum(rows.sum() for key, rows in out.items() if key != "s").backward()
        dictionary.train(batches, 0, kept_ids(model, dictionary, rank))
    check_held(case, model, dictionary, rank)


# Over gloo TorchRec can't exchange row-wise rows of uneven batches.
@pytest.mark.parametrize("case", [ScoredCase(("c", "w"), "bags", "table_wise", 96), SEQUENCES])
def test_ranks_with_fewer_samples(run_ranks, case):
    run_ranks(2, _uneven, case)


def _variable(rank, world_size, device, sharding_type):
    """Features have different batch sizes; samples may share a bag, which a table sees once."""
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=192, embedding_dim=4, feature_names=[f])
        for n, f in (("a", "f"), ("b", "g"))
    ]
    given = {
        "a": HKVOptions(eviction="customized", score_feature="age"),
        "b": HKVOptions(eviction="customized", score_from="weights"),
    }
    model = shard_model(
        make_model(tables),
        {
            name: ParameterConstraints(
                compute_kernels=["hkv"], sharding_types=[sharding_type], options=options
            )
            for name, options in given.items()
        },
        world_size,
        device,
    )
    ids, first = [1, 2, 3, 4, 5], 100 * rank
    ages = [first + 2**40 + i for i in ids]
    features = KeyedJaggedTensor(
        keys=["f", "age", "g"],
        values=torch.tensor([first + i for i in ids] + ages + [first + 1, first + 2]).to(device),
        weights=torch.tensor([0.0] * 10 + [0.5, -2.0]).to(device),
        lengths=torch.tensor([2, 3, 2, 3, 2]).to(device),
        stride_per_key_per_rank=[[2], [2], [1]],
        inverse_indices=(["f", "age", "g"], torch.tensor([[0, 1], [0, 1], [0, 0]]).to(device)),
    )
    model(features).sum().backward()
    found = {}
    for key, lookup in model.module.ebc.group_lookups().items():
        state = lookup.export_table(key)
        there = state["occupied"]
        pairs = zip(state["ids"][there].tolist(), state["scores"][there].tolist(), strict=True)
        found[key] = dict(pairs)
    return found


@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
def test_batch_sizes_by_feature(run_ranks, sharding_type):
    found = run_ranks(2, _variable, sharding_type)
    merged = {"a": {}, "b": {}}
    for of_rank in found:
        for key, scores in of_rank.items():
            merged[key] |= scores
    assert merged["a"] == {100 * r + i: 100 * r + 2**40 + i for r in (0, 1) for i in range(1, 6)}
    assert set(merged["b"]) == {1, 2, 101, 102}
    assert merged["b"][1] == merged["b"][101] > 0 > merged["b"][2] == merged["b"][102]


def _groups(rank, world_size, device):
    """Tables are exchanged in several groups, with 16-bit wires."""
    case = ScoredCase(("c", "w", "lru", "s"), "bags", "row_wise", 192)
    sharder = BackendEmbeddingBagCollectionSharder(num_groups=3, wire_dtype={"w": "fp16"})
    model = shard_model(unsharded(case), constraints(case), world_size, device, [sharder])
    for key, tensor in model.state_dict().items():
        if key.endswith(".s.weight"):
            for shard in tensor.local_shards():
                shard.tensor.fill_(1.0)
    dictionary = Dictionary(case, world_size)
    train(model, case, dictionary, rank, world_size, device, range(6))
    check_held(case, model, dictionary, rank)


def test_groups_of_exchanges(run_ranks):
    run_ranks(2, _groups)


def _accumulated(rank, world_size, device):
    model = make(BAGS, world_size, device)
    batches = [draw(BAGS, rank, step) for step in range(2)]
    with accumulate_gradients(model):
        out = model(to_kjt(BAGS, batches[0], device))
        total(out).backward()
    out = model(to_kjt(BAGS, batches[1], device))
    total(out).backward()
    for key, entries in held(model).items():
        if key == "c":
            last = {}
            for batch in batches:
                for feature in FEATURES["c"]:
                    for bag in batch[feature].bags:
                        last |= {id_: score for id_, _, score in bag}
            assert _score(entries) == last


def test_accumulated_gradients(run_ranks):
    run_ranks(1, _accumulated)


def _pipeline(rank, world_size, device, make_pipeline, case):
    plain = make(case, world_size, device)
    piped = shard_model(WithLoss(unsharded(case)), constraints(case), world_size, device, None)
    steps = range(10)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    pipeline = make_pipeline(model=piped, optimizer=optimizer, device=device)
    batches = iter([to_kjt(case, draw(case, rank, step), device) for step in steps])
    for step in steps:
        for model in (plain, piped):
            with contextlib.suppress(ValueError):
                set_epoch(model, step // 4)
        pipeline.progress(batches)
        out = plain(to_kjt(case, draw(case, rank, step), device))
        total(out).backward()
    lookups = piped.module.model.over.group_lookups()
    for key, entries in held(plain).items():
        state = lookups[key].export_table(key)
        there = state["occupied"]
        scores = dict(
            zip(state["ids"][there].tolist(), state["scores"][there].tolist(), strict=True)
        )
        assert scores == _score(entries)


@pytest.mark.parametrize("kind", ["bags", "sequences"])
@pytest.mark.parametrize("pipeline", [TrainPipelineBase, TrainPipelineSparseDist])
def test_pipelines(run_ranks, pipeline, kind):
    run_ranks(2, _pipeline, pipeline, ScoredCase(("c", "w", "ef", "s"), kind, "row_wise", 192))


CUSTOM = {"eviction": "customized"}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (CUSTOM, "'customized' takes one of score_feature and score_from"),
        ({**CUSTOM, "score_feature": "a", "score_from": "weights"}, "takes one of"),
        ({"score_feature": "a"}, "other policies take neither"),
        ({"eviction": "lfu", "score_from": "weights"}, "other policies take neither"),
        ({**CUSTOM, "score_from": "ids"}, "score_from is 'ids', but must be 'weights' or None"),
        ({**CUSTOM, "score_feature": ["a"]}, r"score_feature is \['a'\], but must be"),
        ({**CUSTOM, "score_feature": ()}, r"score_feature is \(\), but must be"),
        ({**CUSTOM, "score_feature": "a", "dense": True}, "evicts none"),
        ({"eviction": "fifo"}, "eviction is 'fifo', but must be one of 'lru', .*'customized'"),
    ],
)
def test_impossible_options(options, match):
    with pytest.raises(ValueError, match=match):
        HKVOptions(**options)


def _wrong_number(rank, world_size, device):
    table = EmbeddingBagConfig(
        name="t", num_embeddings=64, embedding_dim=4, feature_names=["f", "g"]
    )
    options = HKVOptions(eviction="customized", score_feature="a")
    constraint = ParameterConstraints(compute_kernels=["hkv"], options=options)
    with pytest.raises(ValueError, match=r"score_feature=\['a'\] and looks up \['f', 'g'\]"):
        shard_model(make_model([table]), {"t": constraint}, world_size, device)


def test_a_feature_of_scores_for_each_feature(run_ranks):
    run_ranks(1, _wrong_number)


def _refused(rank, world_size, device, case):
    model = make(case, world_size, device)
    good = to_kjt(case, draw(case, rank, 0), device)
    keys, lengths = list(good.keys()), good.lengths().clone()

    def changed(**changes):
        arguments = {
            "keys": keys,
            "values": good.values(),
            "lengths": good.lengths(),
            "weights": good.weights(),
        }
        return KeyedJaggedTensor(**(arguments | changes))

    at = keys.index("f_score")
    ends = good.offset_per_key()
    moved = lengths.view(len(keys), BATCH)
    moved[at] = moved[at].roll(1)
    large = good.values().clone()
    large[ends[at]] = 2**31
    other = "f_other"
    bad = [
        (changed(weights=None), "weights|weighted"),
        (changed(keys=[other if k == "f_score" else k for k in keys]), "'f_score', which the b"),
        (changed(lengths=moved.flatten()), "from feature 'f_score', whose bag"),
    ]
    if case.kind == "weighted":
        bad.append((changed(values=large), f"is {2**31}, but scores in a weighted collection"))
    if not case.are_bags:
        strides = [[BATCH]] * len(keys)
        inverse = torch.arange(BATCH, device=device).repeat(len(keys), 1)
        variable = changed(stride_per_key_per_rank=strides, inverse_indices=(keys, inverse))
        bad.append((variable, "a separate batch size for each feature"))
    for features, match in bad:
        with pytest.raises(ValueError, match=match):
            model(features)
    assert all(not entries for entries in held(model).values())
    model(good)


@pytest.mark.parametrize(
    "case", [BAGS, SEQUENCES, ScoredCase(("c", "w", "s"), "weighted", "table_wise", 96)]
)
def test_refused_batches(run_ranks, device_type, case):
    if device_type == "cuda":
        pytest.skip("a GPU finds bad lengths by an assertion of its own, which ends it")
    run_ranks(1, _refused, case)


def _no_epochs(rank, world_size, device):
    model = make(BAGS, world_size, device)
    with pytest.raises(ValueError, match="set_epoch needs a table with epochs"):
        set_epoch(model, 1)
    with_epochs = make(ScoredCase(("ef", "s"), "bags", "row_wise", 192), world_size, device)
    for epoch in (-1, 2**32, 1.5, True):
        with pytest.raises(ValueError, match=r"set_epoch: epoch is .*, but must be an integer"):
            set_epoch(with_epochs, epoch)


def test_refused_epochs(run_ranks):
    run_ranks(1, _no_epochs)
