"""A load refuses a delta that is lost, repeated, out of order, damaged or of another chain. All
ranks name the delta, and nothing changes."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest

from tests.support.checkpoint_models import make_tables, model_contents, train
from tests.support.damage import cut
from torchrec_hkv import checkpoint
from torchrec_hkv.hash_table import MinFrequency

ADMISSION = MinFrequency(2, entries=256)
WRITES = 4


def _write(rank, world_size, device, folder, seed=0):
    model = make_tables(world_size, device, "row_wise", admission=ADMISSION)
    writer = checkpoint.DeltaWriter(model, folder)
    for write in range(WRITES):
        train(model, rank, device, range(seed + write, seed + write + 1))
        writer.write()


def _refusal(rank, world_size, device, path):
    """The error message of a load, or None if it succeeds."""
    model = make_tables(world_size, device, "row_wise", admission=ADMISSION)
    train(model, rank, device, range(50, 51))
    before = model_contents(model, "adam")
    try:
        checkpoint.load(path, model)
    except ValueError as error:
        assert model_contents(model, "adam") == before
        return str(error)
    return None


@pytest.fixture(scope="module")
def chains(tmp_path_factory):
    """Folder of the chains, which the first test makes and each test copies."""
    return tmp_path_factory.mktemp("chains")


@pytest.fixture
def chain(run_ranks, chains, device_type, tmp_path):
    """A base and three deltas, beside the same chain of another run."""
    for name, seed in (("one", 0), ("other", 0)):
        if not (chains / device_type / name).exists():
            run_ranks(2, _write, chains / device_type / name, seed)
    shutil.copytree(chains / device_type, tmp_path / "chains")
    return tmp_path / "chains" / "one"


def _lose_middle(chain, other):
    shutil.rmtree(chain / "delta-000002")
    return "lacks checkpoint 2 of its chain, which delta-000003 adds to"


def _lose_last(chain, other):
    shutil.rmtree(chain / "delta-000003")
    return "lacks checkpoint 3 of its chain, which deltas.json names as the newest"


def _lose_base(chain, other):
    shutil.rmtree(chain / "base-000000")
    return "lacks checkpoint 0 of its chain, which delta-000001 adds to"


def _lose_newest(chain, other):
    (chain / "deltas.json").unlink()
    return "deltas.json is missing"


def _double_as_next(chain, other):
    shutil.copytree(chain / "delta-000003", chain / "delta-000004")
    return "delta-000004 is another checkpoint: it was saved as 'delta-000003'"


def _double_in_place(chain, other):
    shutil.rmtree(chain / "delta-000002")
    shutil.copytree(chain / "delta-000001", chain / "delta-000002")
    return "delta-000002 is another checkpoint: it was saved as 'delta-000001'"


def _double_as_base(chain, other):
    shutil.copytree(chain / "delta-000002", chain / "base-000002")
    return "holds both base-000002 and delta-000002"


def _reorder(chain, other):
    (chain / "delta-000001").rename(chain / "x")
    (chain / "delta-000002").rename(chain / "delta-000001")
    (chain / "x").rename(chain / "delta-000002")
    return "delta-000002 is another checkpoint: it was saved as 'delta-000001'"


def _foreign_middle(chain, other):
    shutil.rmtree(chain / "delta-000002")
    shutil.copytree(other / "delta-000002", chain / "delta-000002")
    return "delta-000003 does not follow .*delta-000002: it adds to a checkpoint of digest"


def _foreign_last(chain, other):
    shutil.rmtree(chain / "delta-000003")
    shutil.copytree(other / "delta-000003", chain / "delta-000003")
    return "delta-000003 is not of this chain"


def _foreign_next(chain, other):
    shutil.rmtree(other / "delta-000001")
    shutil.copytree(other / "delta-000003", chain / "delta-000004")
    return "delta-000004 is another checkpoint: it was saved as 'delta-000003'"


def _foreign_base(chain, other):
    shutil.rmtree(chain / "base-000000")
    shutil.copytree(other / "base-000000", chain / "base-000000")
    return "delta-000001 does not follow .*base-000000"


def _foreign_shard(chain, other):
    place = "delta-000001/tables/ebc.embedding_bags.lru/00001"
    shutil.rmtree(chain / place)
    shutil.copytree(other / place, chain / place)
    return f"{place} is not what the checkpoint was saved with: it is of save"


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        _lose_middle,
        _lose_last,
        _lose_base,
        _lose_newest,
        _double_as_next,
        _double_in_place,
        _double_as_base,
        _reorder,
        _foreign_middle,
        _foreign_last,
        _foreign_next,
        _foreign_base,
        _foreign_shard,
    ],
)
def test_another_in_its_place(run_ranks, chain, change):
    message = change(chain, chain.parent / "other")
    refusals = run_ranks(2, _refusal, chain)
    assert refusals[0] == refusals[1] is not None
    assert re.search(message, refusals[0]), refusals[0]


def test_a_prefix_needs_no_later_delta(run_ranks, chain):
    shutil.rmtree(chain / "delta-000003")
    (chain / "deltas.json").unlink()
    assert run_ranks(2, _refusal, chain / "delta-000002") == [None, None]


def test_a_delta_by_itself(run_ranks, chain, tmp_path):
    shutil.copytree(chain / "delta-000002", tmp_path / "delta-000002")
    (refusal, _) = run_ranks(2, _refusal, tmp_path / "delta-000002")
    assert "lacks checkpoint 1 of its chain, which delta-000002 adds to" in refusal
    (tmp_path / "delta-000002").rename(tmp_path / "mine")
    (refusal, _) = run_ranks(2, _refusal, tmp_path / "mine")
    assert "rename it to 'delta-000002' again" in refusal
    (tmp_path / "mine" / "chain.json").unlink()
    (refusal, _) = run_ranks(2, _refusal, tmp_path / "mine")
    assert "holds only what changed in table" in refusal


def _damage_all(rank, world_size, device, chain):
    """Damages the files one by one, each in one of three ways."""
    model = make_tables(world_size, device, "row_wise", admission=ADMISSION)
    train(model, rank, device, range(50, 51))
    before = model_contents(model, "adam")
    choice = random.Random(3)
    messages = []
    for path in sorted(p for p in Path(chain).rglob("*") if p.is_file()):
        name = str(path.relative_to(chain))
        way = choice.choice(("bit", "cut", "gone"))
        good = path.read_bytes()
        if way == "gone":
            path.unlink()
        elif way == "cut":
            path.write_bytes(cut(good, choice) if good else b"more")
        else:
            bad = bytearray(good or b"more")
            bit = choice.randrange(8 * len(bad) - 8)
            bad[bit // 8] ^= 1 << bit % 8
            path.write_bytes(bad)
        error = None
        try:
            checkpoint.load(chain, model)
        except ValueError as raised:
            error = str(raised)
        messages.append((name, way, error))
        path.write_bytes(good)
        if error is None:
            return messages  # the model changed
        assert model_contents(model, "adam") == before
    checkpoint.load(chain, model)
    return messages


@pytest.mark.slow
def test_any_damage(run_ranks, chain):
    # A load reads tensors of the newest delta only, since it has all of them.
    for name in ("base-000000", "delta-000001", "delta-000002"):
        shutil.rmtree(chain / name / "tensors")
    for name, way, error in run_ranks(1, _damage_all, chain)[0]:
        assert error is not None, (name, way)
        assert Path(name).name in error or Path(name).parent.name in error, (name, way, error)
