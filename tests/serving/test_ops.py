"""Ops of read-only tables pass opcheck; what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torchrec_hkv import _C
from torchrec_hkv.serving.row_formats import to_bytes
from torchrec_hkv.serving.table_file import build_layer
from torchrec_hkv.serving.tables import ReadOnlyTable, ReadOnlyTables
from torchrec_hkv.tensor_train import TTGroup, make_shape

OPS = torch.ops.torchrec_hkv
CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


def table(dim: int = 8, name: str = "t") -> ReadOnlyTable:
    ids = torch.arange(-5, 20)
    layer = build_layer(ids, to_bytes(torch.randn(25, dim), "fp32"))
    return ReadOnlyTable(name, dim, "fp32", *layer)


@pytest.fixture
def tables() -> ReadOnlyTables:
    shape = make_shape(30, 8, num_cores=2, ranks=2)
    cores = [torch.randn(size) for size in shape.core_shapes]
    group = TTGroup([shape, shape], [0, 1])
    return ReadOnlyTables([table(8), table(12)], None, [(group, [*cores, *cores])])


IDS = torch.tensor([3, 7, 7, 0, 100, 2, 1])
IDS_OF_TT = IDS.clamp(max=20)
LENGTHS = torch.tensor([[2, 0], [4, 1]])


def test_opcheck(tables):
    handle, weights = tables.handle, torch.rand(7)
    pooled = (handle, IDS, LENGTHS, weights, [0, 1, 1], [1, 0, 1], [0, 1, 3], 32, torch.float16)
    rows = (handle, IDS, LENGTHS, [1, 0], [0, 1], [8, 12], torch.float32)
    cores = (handle, IDS_OF_TT, LENGTHS, weights, [0, 1], 0, [8, 8])
    # Counters are not arguments, so the ops' schemas say that they change nothing.
    torch.library.opcheck(OPS.serving_pool, pooled, test_utils=CHECKS)
    torch.library.opcheck(OPS.serving_rows, rows, test_utils=CHECKS)
    torch.library.opcheck(OPS.serving_tt, (*cores, True, True), test_utils=CHECKS)
    cores = (handle, IDS_OF_TT, LENGTHS, None, [0, 1], 0, [8, 8], False, False)
    torch.library.opcheck(OPS.serving_tt, cores, test_utils=CHECKS)
    torch.library.opcheck(OPS.serving_place, (torch.arange(20), None, 1, 4, 0, 1, 0))
    torch.library.opcheck(OPS.serving_blocks, (torch.arange(20), 3))
    # It returns a handle, so it has no fake. opcheck does not close what it opens, so it opens no
    # tables.
    no_tables = (*([] for _ in range(15)), torch.zeros(0, 2, dtype=torch.int64), [], [], [])
    checks = ("test_schema", "test_autograd_registration")
    torch.library.opcheck(OPS.serving_open, no_tables, test_utils=checks)


def test_direct_calls(tables):
    """The module's functions return what the ops do, refuse the same, and appear in profiles."""
    pooled = (tables.handle, IDS, LENGTHS, torch.rand(7), [0, 1], [1, 0], [0, 1], 20, torch.float16)
    rows = (tables.handle, IDS, LENGTHS, (1, 0), (0, 1), (8, 12), torch.float32)
    with torch.profiler.profile() as profile:
        got = _C.serving_pool(*pooled), *_C.serving_rows(*rows)
    want = OPS.serving_pool(*pooled), *OPS.serving_rows(*rows)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    names = {event.key for event in profile.key_averages()}
    assert names >= {"torchrec_hkv::serving_pool", "torchrec_hkv::serving_rows"}
    with pytest.raises(ValueError, match="lengths add up to 7, but there are 6 ids"):
        _C.serving_pool(tables.handle, IDS[1:], LENGTHS, None, *pooled[4:])
    with pytest.raises(TypeError, match="ids must be of dtype Long"):
        _C.serving_rows(tables.handle, IDS.int(), *rows[2:])


def test_rows_of_one_table(tables):
    """Equals the rows that the op returns for the same ids."""
    want = OPS.serving_rows(tables.handle, IDS, LENGTHS, [0, 1], [0, 0], [8, 8], torch.float16)
    assert torch.equal(tables.rows(0, IDS, dtype=torch.float16), torch.cat(want))
    strided = torch.stack([IDS, IDS], 1)[:, 0]
    assert torch.equal(tables.rows(0, strided, dtype=torch.float16), torch.cat(want))
    assert tables.rows(1, IDS[:0]).shape == (0, 12)
    with pytest.raises(TypeError, match="ids must be of dtype Long"):
        tables.rows(0, IDS.int())
    with pytest.raises(ValueError, match="ids must"):
        tables.rows(0, IDS.view(1, -1))
    with pytest.raises(TypeError, match="must be of dtype Float, Half or BFloat16"):
        tables.rows(0, IDS, dtype=torch.int32)


def test_bad_lengths_of_rows(tables):
    def rows(ids, lengths, features=(0,)):
        tables_of = [0] * len(features)
        dims = [8] * len(features)
        return OPS.serving_rows(
            tables.handle, ids, lengths, features, tables_of, dims, torch.float32
        )

    with pytest.raises(ValueError, match="lengths add up to 7, but there are 6 ids"):
        rows(IDS[1:], LENGTHS)
    with pytest.raises(ValueError, match="lengths must not be negative, but have -1 for feature 1"):
        rows(IDS[:1], torch.tensor([[2], [-1]]))
    with pytest.raises(ValueError, match="feature 2 is asked for"):
        rows(IDS, LENGTHS, (2,))


def test_bad_lookups(tables):
    handle = tables.handle

    def pool(*changed, handle=handle, ids=IDS, lengths=LENGTHS, weights=None, **others):
        given = {"features": [0], "tables": [0], "kinds": [0], "columns": 8, "dtype": torch.float32}
        return OPS.serving_pool(handle, ids, lengths, weights, **{**given, **others})

    with pytest.raises(TypeError, match="ids must be of dtype Long"):
        pool(ids=IDS.float())
    with pytest.raises(TypeError, match="lengths must be of dtype Int or Long"):
        pool(lengths=LENGTHS.float())
    with pytest.raises(ValueError, match=r"lengths must have shape \[features, samples\]"):
        pool(lengths=LENGTHS.flatten())
    with pytest.raises(ValueError, match="lengths add up to 7, but there are 6 ids"):
        pool(ids=IDS[1:])
    with pytest.raises(ValueError, match="weights must have 7 elements"):
        pool(weights=torch.rand(6))
    with pytest.raises(ValueError, match="feature 2 is asked for"):
        pool(features=[2])
    with pytest.raises(ValueError, match="table 2 is asked for"):
        pool(tables=[2])
    with pytest.raises(ValueError, match=r"kinds\[0\] is 4, but must be from 0 to 3"):
        pool(kinds=[4])
    with pytest.raises(ValueError, match="columns is 9, but the tables have 8"):
        pool(columns=9)
    with pytest.raises(TypeError, match="must be of dtype Float, Half or BFloat16"):
        pool(dtype=torch.int64)
    with pytest.raises(ValueError, match="names no open read-only tables"):
        pool(handle=torch.tensor([1 << 40]))
    with pytest.raises(ValueError, match="table is 2, but must be from 0 to 1"):
        tables.rows(2, IDS)


def test_bad_tables():
    good = table()
    with pytest.raises(ValueError, match=r"rows of table 0 must be contiguous and of shape"):
        ReadOnlyTables([ReadOnlyTable("t", 9, "fp32", good.index, good.rows)])
    with pytest.raises(ValueError, match=r"of shape \[blocks, buckets, 8\]"):
        ReadOnlyTables([ReadOnlyTable("t", 8, "fp32", good.index[0], good.rows)])
    with pytest.raises(ValueError, match="id 4 occurs twice"):
        build_layer(torch.tensor([1, 4, 3, 4]), torch.zeros(4, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match="is not of these blocks"):
        OPS.serving_place(torch.arange(50), None, 2, 8, 0, 1, 0)
    with pytest.raises(ValueError, match="finds no place: the table is too full"):
        OPS.serving_place(torch.arange(50), None, 1, 7, 0, 1, 0)


def test_full():
    """An index without a free slot."""
    ids = torch.arange(14)
    index, order = OPS.serving_place(ids, None, 1, 2, 0, 1, 0)
    assert order.sort().values.tolist() == ids.tolist()
    rows = to_bytes(ids.float()[order].view(-1, 1), "fp32")
    tables = ReadOnlyTables([ReadOnlyTable("t", 1, "fp32", index, rows)])
    assert torch.equal(tables.rows(0, ids).flatten(), ids.float())


def test_closed():
    tables = ReadOnlyTables([table()])
    handle = tables.handle
    OPS.serving_rows(handle, IDS, LENGTHS, [0], [0], [8], torch.float32)
    del tables
    with pytest.raises(ValueError, match="names no open read-only tables"):
        OPS.serving_rows(handle, IDS, LENGTHS, [0], [0], [8], torch.float32)


class _Calls(torch.nn.Module):
    """Calls a function in its forward."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.function()
        return x + 1


def test_tables_that_end_while_a_program_is_traced():
    """Garbage collection may free tables while a program is traced. The program must not contain
    that."""
    held = [ReadOnlyTables([table()])]
    handle = held[0].handle.clone()
    exported = torch.export.export(_Calls(held.clear), (torch.ones(2),), strict=False)
    assert not held
    assert not [node for node in exported.graph.nodes if "serving" in str(node.target)]
    with pytest.raises(ValueError, match="names no open read-only tables"):
        OPS.serving_rows(handle, IDS, LENGTHS, [0], [0], [8], torch.float32)
