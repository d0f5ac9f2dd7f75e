"""Rows train as FBGEMM's table-batched embeddings do."""

import warnings

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)

from tests.support.batches import Bags, random_ids, rate, rows_by_id
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

ROWS, STEPS, DECAY = 60, 20, 0.1
# With a small eps, a gradient that cancels to its rounding error would make a large step.
EPS = 0.01

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
# The CPU kernels lack these optimizers, or ignore their weight decay or the bound on row norms.
ON_GPUS = {
    "rowwise_adagrad_max_norm": (
        RowWiseAdagrad(EPS, max_norm=0.5),
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        {"max_norm": 0.5},
    ),
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


FEATURES = [0, 1, 1, 2]
DIMS = (4, 64, 132)


class Both:
    """The same tables here and in FBGEMM.

    Args:
        case: of the optimizers.
        device: ``"cpu"`` or ``"cuda"``.
        mean: how bags are pooled.
        rows: dtype of the rows.
        output: dtype of the outputs.
    """

    def __init__(self, case, device, mean, rows=torch.float32, output=torch.float32):
        gpu = device == "cuda"
        if case in ON_GPUS and not gpu:
            pytest.skip("FBGEMM has this on GPUs only")
        optimizer, theirs, arguments = {**ON_BOTH, **ON_GPUS}[case]
        specs = [
            TableSpec(f"t{dim}", 100, dim, initializer=Uniform(-0.5, 0.5), dtype=rows)
            for dim in DIMS
        ]
        place = EmbeddingLocation.DEVICE if gpu else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if gpu else ComputeDevice.CPU
        self.device, self.mean, self.output = device, mean, output
        self.names = random_ids(ROWS)  # id of each row
        with warnings.catch_warnings(action="ignore"):  # some optimizers are experimental
            self.tbe = SplitTableBatchedEmbeddingBagsCodegen(
                [(ROWS, spec.dim, place, compute) for spec in specs],
                feature_table_map=FEATURES,
                optimizer=theirs,
                learning_rate=0.05,
                eps=EPS,
                pooling_mode=PoolingMode.MEAN if mean else PoolingMode.SUM,
                weights_precision=SparseType.from_dtype(rows),
                output_dtype=SparseType.from_dtype(output),
                stochastic_rounding=False,
                device=torch.device(device, 0) if gpu else torch.device("cpu"),
                **arguments,
            )
        for spec, weight in zip(specs, self.tbe.split_embedding_weights(), strict=True):
            weight.data.copy_(
                initial_rows(self.names, spec.dim, table=spec.name, initializer=spec.initializer)
            )
        self.group = TableGroup(specs, FEATURES, optimizer, device=device)

    def _own(self, rows, weights):
        group, ids = self.group, self.names.to(self.device)[rows.ids]
        anchor = torch.empty(0, device=self.device, requires_grad=True)
        pin = group.pin()
        slots = group.find_or_insert(ids, rows.offsets, rows.batch_size, pin)
        where = (ids, rows.offsets, weights, slots, rows.batch_size, self.mean, pin)
        return group.pooled_lookup(anchor, *where, rate(0.05, group), dtype=self.output)

    def step(self, weighted):
        """A step of both. Returns outputs, and gradients of weights or None, ours first."""
        rows = Bags.random(len(FEATURES), 30, torch.arange(ROWS)).to(self.device)
        weights = [None, None]
        if weighted:
            drawn = torch.rand(len(rows.ids), device=self.device)
            weights = [drawn.clone().requires_grad_() for _ in range(2)]
        out = self._own(rows, weights[0])
        with warnings.catch_warnings(action="ignore"):
            reference = self.tbe(rows.ids, rows.offsets, weights[1])
        grad = torch.randn_like(out)
        out.backward(grad)
        try:
            reference.backward(grad)
        except RuntimeError as error:
            if "kernel image is invalid" in str(error):
                pytest.skip("this build of FBGEMM has no such kernel for this GPU")
            if "'row_counter_dev' to have scalar type Float" in str(error):
                pytest.skip("this FBGEMM's Adam takes rows of float32 only")
            raise
        outputs = (out.detach(), reference.detach())
        if not weighted:
            return outputs, None
        own, theirs = (of.grad for of in weights)
        if self.mean:  # FBGEMM's are gradients of a sum
            lengths = rows.offsets.diff()
            theirs = theirs / lengths.repeat_interleave(lengths)
        return outputs, (own, theirs)

    def compare_rows(self, **tolerance):
        for table, weight in enumerate(self.tbe.split_embedding_weights()):
            trained = rows_by_id(self.group, table)
            assert len(trained) > ROWS // 2
            by_row = torch.stack(
                [trained.get(id_, weight[row].cpu()) for row, id_ in enumerate(self.names.tolist())]
            )
            torch.testing.assert_close(by_row, weight.cpu(), **tolerance)


@pytest.mark.parametrize("case", [*ON_BOTH, *ON_GPUS])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_equal_to_fbgemm(device_type, case, mean, weighted):
    if device_type == "cpu" and mean and weighted:
        pytest.skip("FBGEMM's CPU backward of a weighted mean does not divide by the length")
    both = Both(case, device_type, mean)
    for _ in range(STEPS):
        outputs, weight_grads = both.step(weighted)
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
        if weight_grads is not None:
            torch.testing.assert_close(*weight_grads, rtol=1e-4, atol=1e-4)
    both.compare_rows(rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["sgd", "rowwise_adagrad", "adagrad", "adam"])
@pytest.mark.parametrize("rows", [torch.float32, torch.float16])
@pytest.mark.parametrize("output", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(device_type, case, rows, output):
    """A few steps only: sums in another order may round to another value."""
    if device_type == "cpu" and output == torch.bfloat16:
        pytest.skip("FBGEMM has such outputs on GPUs only")
    both = Both(case, device_type, False, rows, output)
    last = max(torch.finfo(dtype).eps for dtype in (rows, output))
    tolerance = {"rtol": 1e-5 + 2 * last, "atol": 1e-5 + 2 * last}
    for _ in range(3):
        (out, reference), _ = both.step(False)
        assert out.dtype == reference.dtype == output
        torch.testing.assert_close(out, reference, **tolerance)
    both.compare_rows(**tolerance)
