"""TorchRec's own model-parallel tests, which are in its wheel, with tables on ``hkv``.

They plan with TorchRec's planner, and copy states into the tensors of a ``state_dict``. Therefore
the tables are in dense-compatible mode, and a sharder puts them on the backend.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import ParameterConstraints

from torchrec_hkv import HKVOptions
from torchrec_hkv.sharding import (
    BackendEmbeddingBagCollectionSharder,
    BackendParameterSharding,
)
from torchrec_hkv.sharding.parameter_sharding import KERNEL

# The wheel's tests import a file of sequence models that is not in the wheel. The tests that run
# here don't use these models.
if "torchrec.distributed.tests" not in sys.modules:
    missing = types.ModuleType("torchrec.distributed.tests.test_sequence_model")
    missing.TestEmbeddingCollectionSharder = missing.TestSequenceSparseNN = object
    sys.modules["torchrec.distributed.tests"] = types.ModuleType("torchrec.distributed.tests")
    sys.modules[missing.__name__] = missing

from torchrec.distributed.test_utils import (
    test_model,
    test_model_parallel,
    test_model_parallel_base,
    test_sharding,
)


class DenseSharder(BackendEmbeddingBagCollectionSharder):
    """Offers one sharding type of ``fused`` tables to the planner; puts the tables on ``hkv``."""

    def __init__(self, sharding_type: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sharding_type = sharding_type

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the sharding type."""
        return [self._sharding_type]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the kernels that TorchRec's planner knows."""
        return ["fused"]

    def shard(self, module, params, env, device=None, module_fqn=None):
        """Shards the module with all tables on the backend."""
        dense_params = {
            name: BackendParameterSharding.wrap(
                dataclasses.replace(sharding, compute_kernel=KERNEL),
                "hkv",
                HKVOptions(dense=True),
            )
            for name, sharding in params.items()
        }
        sharded = super().shard(module, dense_params, env, device, module_fqn)
        assert set(sharded._planned) == set(params)
        return sharded


@dataclasses.dataclass(frozen=True)
class TorchRecScenario:
    """Arguments of TorchRec's test.

    Attributes:
        sharding_type: sharding type of all tables.
        is_mean: whether pooling is by mean.
        narrow: whether exchanges use 16 bits.
        variable_per_rank: whether ranks have different batch sizes.
        variable_per_feature: whether features have different batch sizes.
        in_backward: whether optimizers are applied in backward instead of by the sharder.
    """

    sharding_type: str
    is_mean: bool = False
    narrow: bool = False
    variable_per_rank: bool = False
    variable_per_feature: bool = False
    in_backward: bool = False


def run_torchrec_test(
    rank: int, world_size: int, device: torch.device, host_size: int, scenario: TorchRecScenario
) -> None:
    """Runs TorchRec's comparison of one training step with the unsharded model."""
    seed = 17
    random.seed(seed)
    torch.manual_seed(seed)
    case = test_model_parallel.ModelParallelTestShared()
    case.num_features, case.num_weighted_features, case.num_shared_features = 4, 2, 2
    case.table_names = [f"table_{i}" for i in range(6)]
    case._build_tables_and_groups()
    narrow = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    qcomms = narrow if scenario.narrow else None
    constraints = {
        table.name: ParameterConstraints(sharding_types=[scenario.sharding_type], min_partition=8)
        for table in [*case.tables, *case.weighted_tables]
    }
    sharder = DenseSharder(
        scenario.sharding_type,
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1},
        qcomm_codecs_registry=get_qcomm_codecs_registry(qcomms) if qcomms else {},
    )
    in_backward = {
        "embedding_bags": (torch.optim.SGD, {"lr": 0.01}),
        "embeddings": (torch.optim.SGD, {"lr": 0.2}),
    }
    test_sharding.sharding_single_rank_test_single_process(
        pg=dist.group.WORLD,
        device=device,
        rank=rank,
        world_size=world_size,
        model_class=test_model.TestSparseNN,
        embedding_groups=case.embedding_groups,
        tables=case.mean_tables if scenario.is_mean else case.tables,
        weighted_tables=None if scenario.variable_per_feature else case.weighted_tables,
        sharders=[sharder],
        optim=EmbOptimType.EXACT_SGD,
        constraints=constraints,
        local_size=host_size,
        qcomms_config=qcomms,
        apply_optimizer_in_backward_config=in_backward if scenario.in_backward else None,
        variable_batch_size=scenario.variable_per_rank,
        variable_batch_per_feature=scenario.variable_per_feature,
        global_constant_batch=True,
    )


def run_torchrec_state_test(
    rank: int, world_size: int, device: torch.device, sharding_type: str, optimizer: bool
) -> None:
    """Runs TorchRec's tests of ``load_state_dict`` of models and their optimizers."""
    case = test_model_parallel_base.ModelParallelStateDictBase()
    case.device, case.batch_size, case.num_float_features = device, 20, 10
    case.tables, case.weighted_tables = [], []
    case._create_tables()
    sharder = DenseSharder(
        sharding_type,
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": 0.1,
        },
    )
    constraints = {
        table.name: ParameterConstraints(min_partition=4)
        for table in [*case.tables, *case.weighted_tables]
    }
    (first, second), batch = case._generate_dmps_and_batch([sharder], constraints=constraints)
    if optimizer:
        case._train_models(first, first, batch)
        second.load_state_dict(first.state_dict())
        case._train_models(first, second, batch)
        with pytest.raises(AssertionError):
            case._eval_models(first, second, batch)
    second.load_state_dict(first.state_dict())
    if optimizer:
        second.fused_optimizer.load_state_dict(first.fused_optimizer.state_dict())
    else:
        case._eval_models(first, second, batch)
    case._train_models(first, second, batch)
    if optimizer:
        case._eval_models(first, second, batch)
        case._compare_models(first, second)
