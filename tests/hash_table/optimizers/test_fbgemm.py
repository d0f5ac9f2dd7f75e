"""Rows are trained as FBGEMM's table-batched embeddings train them."""

import warnings

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)

from tests.support.batches import Bags, lookup, random_ids, rows_by_id
from torchrec_hkv.hash_table import (
    LAMB,
    SGD,
    Adagrad,
    AdamW,
    RowWiseAdagrad,
    RowWiseAdam,
    TableGroup,
    TableSpec,
    Uniform,
    initial_rows,
)

ROWS, STEPS, EPS, DECAY = 60, 20, 1e-6, 0.1

ON_BOTH = {
    "sgd": (SGD(), EmbOptimType.EXACT_SGD, {}),
    "clipped": (
        SGD(clip_output=0.5),
        EmbOptimType.EXACT_SGD,
        {"gradient_clipping": True, "max_gradient": 0.5},
    ),
    "adagrad": (Adagrad(EPS), EmbOptimType.EXACT_ADAGRAD, {}),
    "rowwise_adagrad": (RowWiseAdagrad(EPS), EmbOptimType.EXACT_ROWWISE_ADAGRAD, {}),
}
# The CPU kernels lack the optimizers, or ignore their weight decay.
ON_GPUS = {
    "rowwise_adagrad_coupled": (
        RowWiseAdagrad(EPS, DECAY),
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        {"weight_decay": DECAY, "weight_decay_mode": WeightDecayMode.L2},
    ),
    "rowwise_adagrad_decoupled": (
        RowWiseAdagrad(EPS, DECAY, "decoupled"),
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        {"weight_decay": DECAY, "weight_decay_mode": WeightDecayMode.DECOUPLE},
    ),
    "adam": (AdamW(eps=EPS, weight_decay=DECAY), EmbOptimType.ADAM, {"weight_decay": DECAY}),
    "rowwise_adam": (
        RowWiseAdam(eps=EPS, weight_decay=DECAY),
        EmbOptimType.PARTIAL_ROWWISE_ADAM,
        {"weight_decay": DECAY},
    ),
    "lamb": (LAMB(eps=EPS, weight_decay=DECAY), EmbOptimType.LAMB, {"weight_decay": DECAY}),
}


@pytest.mark.parametrize("case", [*ON_BOTH, *ON_GPUS])
def test_equal_to_fbgemm(device_type, case):
    gpu = device_type == "cuda"
    if case in ON_GPUS and not gpu:
        pytest.skip("FBGEMM has this on GPUs only")
    optimizer, theirs, arguments = {**ON_BOTH, **ON_GPUS}[case]
    specs = [TableSpec(f"t{dim}", 100, dim, initializer=Uniform(-0.5, 0.5)) for dim in (4, 64, 132)]
    features = [0, 1, 1, 2]
    names = random_ids(ROWS)  # id of each row
    with warnings.catch_warnings(action="ignore"):  # that some optimizers are experimental
        tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (
                    ROWS,
                    spec.dim,
                    EmbeddingLocation.DEVICE if gpu else EmbeddingLocation.HOST,
                    ComputeDevice.CUDA if gpu else ComputeDevice.CPU,
                )
                for spec in specs
            ],
            feature_table_map=features,
            optimizer=theirs,
            learning_rate=0.05,
            eps=EPS,
            device=torch.device(device_type, 0) if gpu else torch.device("cpu"),
            **arguments,
        )
    for spec, weight in zip(specs, tbe.split_embedding_weights(), strict=True):
        weight.data.copy_(
            initial_rows(names, spec.dim, table=spec.name, initializer=spec.initializer)
        )
    group = TableGroup(specs, features, optimizer, device=device_type)
    for _ in range(STEPS):
        rows = Bags.random(len(features), 30, torch.arange(ROWS)).to(device_type)
        ours = Bags(names.to(device_type)[rows.ids], rows.offsets, 30)
        with warnings.catch_warnings(action="ignore"):
            reference = tbe(rows.ids, rows.offsets)
        out = lookup(group, ours, learning_rate=0.05)
        torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-5)
        grad = torch.randn_like(out)
        out.backward(grad)
        try:
            reference.backward(grad)
        except RuntimeError as error:
            if "kernel image is invalid" in str(error):
                pytest.skip("this build of FBGEMM has no such kernel for this GPU")
            raise
    for table, weight in enumerate(tbe.split_embedding_weights()):
        trained = rows_by_id(group, table)
        assert len(trained) > ROWS // 2
        by_row = torch.stack(
            [trained.get(id_, weight[row].cpu()) for row, id_ in enumerate(names.tolist())]
        )
        torch.testing.assert_close(by_row, weight.cpu(), rtol=1e-5, atol=1e-5)
