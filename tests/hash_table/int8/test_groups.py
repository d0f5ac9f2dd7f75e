"""int8 tables in a group train as they do alone, beside rows of other dtypes and widths."""

import pytest
import torch

from tests.support.batches import Bags, lookup, random_ids, rows_by_id
from torchrec_hkv.hash_table import Adam, RowWiseAdagrad, TableGroup, TableSpec, Uniform

BATCH = 50
OPTIMIZERS = {"row-wise Adagrad": RowWiseAdagrad(), "Adam": Adam()}
GROUPS = {
    "int8": [(dim, torch.int8) for dim in (4, 36, 64, 132, 260, 516, 1028)],
    "mixed": [
        (64, torch.int8),
        (128, torch.float32),
        (20, torch.int8),
        (48, torch.bfloat16),
        (600, torch.int8),
    ],
    "not in fours": [(7, torch.int8), (61, torch.int8), (13, torch.float32)],
}


def make(dtypes: list[tuple[int, torch.dtype]], optimizer, device: str, first: int) -> TableGroup:
    specs = [
        TableSpec(
            f"t{first + number}",
            500,
            dim,
            initializer=Uniform(-1, 1),
            dtype=dtype,
            deterministic=True,
        )
        for number, (dim, dtype) in enumerate(dtypes)
    ]
    return TableGroup(specs, list(range(len(specs))), optimizer, device=device)


@pytest.mark.parametrize("weighted", [False, True], ids=["sum", "weighted"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", GROUPS)
def test_as_alone(device_type, case, optimizer, weighted):
    tables = GROUPS[case]
    group = make(tables, OPTIMIZERS[optimizer], device_type, 0)
    alone = [make([one], OPTIMIZERS[optimizer], device_type, k) for k, one in enumerate(tables)]
    pools = [random_ids(80) for _ in tables]
    for _ in range(3):
        # Some bags repeat an id more often than one tile sums at a time.
        parts = [Bags.random(1, BATCH, pool, longest=12) for pool in pools]
        for part, pool in zip(parts, pools, strict=True):
            part.ids[: len(part.ids) // 3] = pool[0]
        lengths = torch.cat([part.offsets.diff() for part in parts])
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        together = Bags(torch.cat([part.ids for part in parts]), offsets, BATCH)
        weights = torch.rand(len(together.ids)) + 0.5 if weighted else None
        grads = [torch.randn(BATCH, dim) * 0.1 for dim, _ in tables]
        bounds = torch.tensor([0] + [len(part.ids) for part in parts]).cumsum(0)

        def its(number, of=weights, ends=bounds):
            return None if of is None else of[ends[number] : ends[number + 1]].to(device_type)

        out = lookup(
            group, together.to(device_type), None if weights is None else weights.to(device_type)
        )
        out.backward(torch.cat(grads, dim=1).to(device_type))
        column = 0
        for number, (table, part) in enumerate(zip(alone, parts, strict=True)):
            one = lookup(table, part.to(device_type), its(number))
            one.backward(grads[number].to(device_type))
            dim = tables[number][0]
            torch.testing.assert_close(out[:, column : column + dim], one, rtol=1e-6, atol=1e-6)
            column += dim
    for number, table in enumerate(alone):
        rows, expected = rows_by_id(group, number), rows_by_id(table)
        assert rows.keys() == expected.keys()
        for id_, row in rows.items():
            torch.testing.assert_close(row, expected[id_], rtol=0, atol=0)
