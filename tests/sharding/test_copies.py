"""A sharded model can't be copied or pickled; the error names an alternative."""

import copy
import pickle

import pytest
from torchrec import EmbeddingBagConfig

from tests.support.models import make_model, shard_model
from torchrec_hkv import ParameterConstraints


def _refusals(rank, world_size, device):
    tables = [
        EmbeddingBagConfig(name=name, feature_names=[name], embedding_dim=4, num_embeddings=100)
        for name in ("h", "s")
    ]
    constraints = {
        "h": ParameterConstraints(compute_kernels=["hkv"]),
        "s": ParameterConstraints(compute_kernels=["fused"]),
    }
    model = shard_model(make_model(tables), constraints, world_size, device)
    match = r"torchrec_hkv\.checkpoint\.save.*torchrec_hkv\.checkpoint\.load"
    for refused in (copy.deepcopy, pickle.dumps):
        for what in (model, model.module, model.module.ebc):
            with pytest.raises(TypeError, match=match) as info:
                refused(what)
            assert str(info.value).startswith("A sharded model can't be copied or pickled")
    assert copy.copy(model.module.ebc).group_lookups() is not None


def test_a_sharded_model_refuses(run_ranks):
    run_ranks(1, _refusals)
