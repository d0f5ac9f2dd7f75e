"""SGD, Adagrad and row-wise Adagrad have a kernel for groups whose rows all have at most eight
columns. It gives the same bits as the kernel for groups that also have wider rows."""

import pytest
import torch

from tests.support.batches import Bags, lookup
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.hash_table import (
    SGD,
    Adagrad,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
)

pytestmark = NEEDS_GPU
BAGS, STEPS = 400, 3
#: Ids drawn as often as each of REPEATS, and more: a warp then lists segments of several units.
FEW, MANY = 20, 1000
#: Lookups of an id in a batch: segments of one position, of several, of the most that one lane
#: sums, and longer ones.
REPEATS = (1, 1, 2, 3, 7, 31, 63, 64, 65, 200)


def batch(features: int, times: int, generator: torch.Generator) -> Bags:
    """Bags of all features, with `times` ids for each of REPEATS."""
    per_feature = []
    for _ in range(features):
        names = torch.randperm(2 * times * len(REPEATS), generator=generator)[
            : times * len(REPEATS)
        ]
        ids = names.repeat_interleave(torch.tensor(REPEATS * times))
        per_feature.append(ids[torch.randperm(len(ids), generator=generator)])
    ids = torch.cat(per_feature)
    cuts = [
        torch.randint(len(its) + 1, (BAGS - 1,), generator=generator).sort().values
        for its in per_feature
    ]
    begins, offsets = 0, [torch.zeros(1, dtype=torch.int64)]
    for its, cut in zip(per_feature, cuts, strict=True):
        offsets += [begins + cut, torch.tensor([begins + len(its)])]
        begins += len(its)
    return Bags(ids, torch.cat(offsets), BAGS)


@pytest.mark.parametrize("weighted", [False, True], ids=["sum", "weighted mean"])
@pytest.mark.parametrize("dtypes", ["fp32", "fp16", "bf16", "mixed"])
@pytest.mark.parametrize(
    ("dims", "times"), [((4,), FEW), ((8,), FEW), ((8, 4, 8), FEW), ((8,), MANY)], ids=str
)
@pytest.mark.parametrize(
    "optimizer", [SGD(), RowWiseAdagrad(), Adagrad()], ids=lambda o: type(o).__name__
)
def test_same_bits_as_beside_wider_rows(optimizer, dims, times, dtypes, weighted):
    types = {
        "fp32": [torch.float32],
        "fp16": [torch.float16],
        "bf16": [torch.bfloat16],
        "mixed": [torch.float32, torch.float16],
    }[dtypes]
    specs = [
        TableSpec(
            f"t{i}",
            32 * times * len(REPEATS),
            dim,
            initializer=Uniform(-1, 1),
            dtype=types[i % len(types)],
        )
        for i, dim in enumerate(dims)
    ]
    wide = TableSpec("wide", 64, 64, initializer=Uniform(-1, 1))
    features = [*range(len(dims)), 0]  # two features share the first table
    alone = TableGroup(specs, features, optimizer, "cuda")
    beside = TableGroup([*specs, wide], features, optimizer, "cuda")
    generator = torch.Generator().manual_seed(torch.initial_seed() % 2**31)
    for _ in range(STEPS):
        bags = batch(len(features), times, generator).to("cuda")
        weights = None
        if weighted:
            weights = torch.rand(len(bags.ids), generator=generator).cuda() + 0.5
        grad = torch.randn(BAGS, sum(dims[f] for f in features), generator=generator).cuda()
        for group in (alone, beside):
            out = lookup(group, bags, weights, weighted)
            out.backward(grad.to(out.dtype))
    for table in range(len(dims)):
        one, other = (group.export_table(table) for group in (alone, beside))
        first, second = one.ids.argsort(), other.ids.argsort()
        assert torch.equal(one.ids[first], other.ids[second])
        assert torch.equal(one.rows[first], other.rows[second])
        if one.states is not None:
            assert torch.equal(one.states[first], other.states[second])
