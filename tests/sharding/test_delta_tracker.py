"""TorchRec's ModelDeltaTracker tracks the raw ids that a rank's tables look up."""

from __future__ import annotations

import pytest
import torch
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.model_tracker.types import TrackingMode

from tests.support.pipelines import BATCH, make_pipeline_model, pipeline_batch
from torchrec_hkv.hash_table import owner_rank

pytestmark = pytest.mark.compat

STEPS = 3
TABLES = {"f": "ebc.embedding_bags.t", "h": "ec.embeddings.q"}


def _sent(world_size, key):
    """The distinct ids of a feature over all ranks and steps."""
    ids = [
        pipeline_batch(rank, step, torch.device("cpu"))[key].values()
        for rank in range(world_size)
        for step in range(STEPS)
    ]
    return torch.cat(ids).unique()


def _track(rank, world_size, device, sharding_type):
    model = make_pipeline_model(world_size, device, sharding_type)
    tracker = ModelDeltaTrackerTrec(model, mode=TrackingMode.ID_ONLY)
    for step in range(STEPS):
        model(pipeline_batch(rank, step, device))[0].backward()
        tracker.step()
    return {name: ids.cpu().sort().values for name, ids in tracker.get_unique_ids().items()}


@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
def test_raw_ids(run_ranks, sharding_type):
    results = run_ranks(2, _track, sharding_type)
    for key, name in TABLES.items():
        sent = _sent(2, key)
        tracked = [ids.get(name, torch.empty(0, dtype=torch.int64)) for ids in results]
        assert torch.equal(torch.cat(tracked).sort().values, sent)
        assert sent.numel() > BATCH
        if sharding_type == "row_wise":
            for rank, ids in enumerate(tracked):
                assert ids.numel() > 0
                assert (owner_rank(ids, 2) == rank).all()


def _track_rows(rank, world_size, device):
    model = make_pipeline_model(world_size, device, "row_wise")
    tracker = ModelDeltaTrackerTrec(
        model, mode=TrackingMode.EMBEDDING, fqns_to_skip=["ebc"], delete_on_read=False
    )
    features = pipeline_batch(rank, 0, device)
    model.eval()
    model(features)
    tracked = tracker.get_unique()[TABLES["h"]]
    rows = dict(zip(tracked.ids.tolist(), tracked.states.cpu(), strict=True))
    given = model.module.ec(features)["h"].values().cpu()
    return rows, dict(zip(features["h"].values().tolist(), given, strict=True))


def test_rows_of_sequences(run_ranks):
    results = run_ranks(2, _track_rows)
    rows = {row_id: row for tracked, _ in results for row_id, row in tracked.items()}
    for _, given in results:
        for row_id, row in given.items():
            assert torch.equal(rows[row_id], row)


MOMENTUM_MODES = ["MOMENTUM_LAST", "MOMENTUM_DIFF", "ROWWISE_ADAGRAD"]


def _refused(rank, world_size, device, mode, skipped):
    """The error of a tracker that would read optimizer states; empty if it is created."""
    model = make_pipeline_model(world_size, device, "row_wise")
    try:
        ModelDeltaTrackerTrec(model, mode=TrackingMode[mode], fqns_to_skip=skipped)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "mode", [name for name in MOMENTUM_MODES if name in TrackingMode.__members__]
)
@pytest.mark.parametrize(("skipped", "table"), [(("ec",), "'t'"), (("ebc",), "'q'")])
def test_modes_that_read_optimizer_states_are_refused(run_ranks, mode, skipped, table):
    for sentence in run_ranks(2, _refused, mode, skipped):
        assert table in sentence
        assert "use TrackingMode.ID_ONLY" in sentence
