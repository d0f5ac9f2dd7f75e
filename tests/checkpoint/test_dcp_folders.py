"""A folder of torch.distributed.checkpoint is refused with the call that loads it, which does."""

from __future__ import annotations

import re

import pytest
import torch.distributed.checkpoint as dcp

from tests.support.checkpointed import make_tables, train
from torchrec_hkv import checkpoint
from torchrec_hkv.cli import main


def _say(rank, world_size, device, folder):
    model, fresh = (make_tables(world_size, device, "row_wise") for _ in range(2))
    train(model, rank, device, range(3))
    dcp.save(model.state_dict(), checkpoint_id=folder / "plain")
    checkpoint.save(folder / "ours", model)
    with pytest.raises(ValueError, match=r"name .*ours") as refusal:
        checkpoint.load(folder / "ours" / "tensors", model)
    assert str(refusal.value).endswith(f"name {folder / 'ours'}.")
    with pytest.raises(ValueError, match=r"that torch\.distributed\.checkpoint saved") as refusal:
        checkpoint.load(folder / "plain", fresh)
    # The call that it says, as it says it.
    said = re.search(r"load it by (.*\(state\)), into", str(refusal.value))[1]
    exec(said, {"model": fresh, "torch": __import__("torch")})
    return checkpoint.digest(model) == checkpoint.digest(fresh)


def test_the_call_is_said(run_ranks, tmp_path, capsys):
    assert run_ranks(2, _say, tmp_path) == [True, True]
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", str(tmp_path / "plain")])
    assert stopped.value.code == 2
    assert "torch.distributed.checkpoint" in capsys.readouterr().err
