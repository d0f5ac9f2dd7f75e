"""The file of measured constants is written, read, found at its default path, or refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torchrec import EmbeddingBagConfig

from tests.support.calibrations import calibration
from tests.support.models import make_model, topology
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, get_default_sharders
from torchrec_hkv.backends.constants import Constants, Fit
from torchrec_hkv.planner import Calibration, default_path
from torchrec_hkv.planner.calibration import VARIABLE, calibration_for

CPU = torch.device("cpu")


def _times(**kwargs):
    table = EmbeddingBagConfig(name="t", num_embeddings=64, embedding_dim=4, feature_names=["f"])
    planner = EmbeddingShardingPlanner(
        topology=topology(1, CPU),
        batch_size=10,
        constraints={
            "t": ParameterConstraints(
                compute_kernels=["hkv"], sharding_types=["table_wise"], pooling_factors=[3.0]
            )
        },
        **kwargs,
    )
    report = planner.plan(make_model([table]), get_default_sharders()).plan["ebc"].reports["t"]
    return report.times[0], report.group_time


def test_what_is_written_is_read(tmp_path):
    calibrated = calibration(hkv=0.1, fused=0.2)
    path = tmp_path / "deep" / "constants.json"
    calibrated.save(path)
    calibrated.save(path)
    assert Calibration.load(path) == calibrated
    assert [entry.name for entry in path.parent.iterdir()] == ["constants.json"]


def test_the_planner_takes_a_calibration_or_its_file(tmp_path):
    calibrated = calibration(hkv=0.1)
    calibrated.save(tmp_path / "c.json")
    for given in (calibrated, tmp_path / "c.json", str(tmp_path / "c.json")):
        times, group = _times(calibration=given)
        assert (times.fwd_compute, times.bwd_compute) == (pytest.approx(3.0), pytest.approx(3.0))
        assert (group.forward, group.backward) == (0.25, 0.5)


@pytest.mark.parametrize("kernel", ["hkv", "fused"])
def test_tables_share_caches(kernel):
    """A small table beside a large one is read at the large one's speed."""
    fits = tuple(Fit(size, {"ids": cost}, {}) for size, cost in ((1e4, 1e-3), (1e6, 5e-3)))
    measured = dataclasses.replace(calibration(), constants={kernel: Constants(fits)})
    times = {}
    for large in (16, 1 << 20):
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=n, embedding_dim=4, feature_names=[name])
            for name, n in (("t", 16), ("u", large))
        ]
        constraint = ParameterConstraints(compute_kernels=[kernel], sharding_types=["table_wise"])
        planner = EmbeddingShardingPlanner(
            topology=topology(1, CPU),
            batch_size=10,
            constraints={"t": constraint, "u": constraint},
            calibration=measured,
        )
        plan = planner.plan(make_model(tables), get_default_sharders()).plan["ebc"]
        times[large] = [plan.reports[name].times[0].fwd_compute for name in "tu"]
    assert times[1 << 20] == [pytest.approx(0.05), pytest.approx(0.05)]
    assert max(times[16]) < 0.02


def test_without_one_bandwidths_count():
    times, group = _times()
    assert 0 < times.fwd_compute < 0.01
    assert group is None


def test_the_default_place(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path("cpu") == tmp_path / "torchrec_hkv" / "calibration-cpu.json"
    assert calibration_for("cpu", None) is None
    calibration(hkv=0.1).save(default_path("cpu"))
    assert _times()[0].fwd_compute == pytest.approx(3.0)
    assert calibration_for("cuda", None) is None
    monkeypatch.setenv(VARIABLE, str(tmp_path / "told.json"))
    calibration(hkv=0.2).save(default_path("cuda"))
    assert _times()[0].fwd_compute == pytest.approx(6.0)
    assert calibration_for("cuda", None) is None  # the file was measured on a CPU
    monkeypatch.setenv(VARIABLE, "")
    assert default_path("cpu") is None


def test_one_of_another_kind_of_device_is_refused():
    with pytest.raises(ValueError, match="for device type 'cuda', but the topology has 'cpu'"):
        _times(calibration=calibration("cuda", hkv=0.1))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(format=1),
        lambda content: content.pop("device"),
        lambda content: content.update(constants_ms={"hkv": []}),
        lambda content: content["constants_ms"]["hkv"][0].update(forward={"ids": -1}),
        lambda content: content.update(threads=None),
        lambda content: content.update(stages_ms={"input_dist": {"fixed": 1.0}}),
        lambda content: content.update(stages_ms={"0": {}}),
    ],
)
def test_another_file_is_refused_by_name(tmp_path, change):
    path = tmp_path / "c.json"
    calibration(hkv=0.1).save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"c\.json' is not a file of torchrec-hkv calibrate"):
        Calibration.load(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_so_is_what_is_no_calibration_at_all(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match=r"c\.json'"):
        _times(calibration=tmp_path / "c.json")


def test_so_is_a_missing_one(tmp_path):
    with pytest.raises(ValueError, match="can't be read: No such file"):
        _times(calibration=tmp_path / "c.json")


def test_parts_of_a_step_are_those_of_the_nearest_number_of_ranks(tmp_path):
    parts = {ranks: {"input_dist": {"fixed": float(ranks)}} for ranks in (1, 4)}
    calibrated = dataclasses.replace(calibration(hkv=0.1), stages=parts)
    calibrated.save(tmp_path / "c.json")
    read = Calibration.load(tmp_path / "c.json")
    assert read == calibrated
    assert [read.stages_of(ranks) for ranks in (1, 3, 64)] == [parts[1], parts[4], parts[4]]
    assert calibration(hkv=0.1).stages_of(2) == {}


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="'hkw' can't be calibrated: allowed are"):
        Calibration.measured(CPU, ["hkw"])
    with pytest.raises(ValueError, match="'toy' has no calibration cases"):
        Calibration.measured(CPU, ["toy"])


def test_constants_are_of_the_device_they_say():
    calibrated = calibration(hkv=0.1)
    assert dataclasses.replace(calibrated, threads=2) != calibrated
