"""Modules under torch.compile."""

import torch

from tests.support.embeddings import make_embedding, rows_of
from torchrec_hkv import HKVAdamOptimizer


class _Model(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = make_embedding(device=device)
        self.linear = torch.nn.Linear(4, 1, device=device)

    def forward(self, ids):
        return self.linear(self.embedding(ids)).square().sum()


def _train(device, compiled):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()  # which earlier tests of this process may have counted
    model = _Model(device)
    optimizer = HKVAdamOptimizer(model.embedding, lr=0.1)
    # Compiles without code generation, and functionalizes like the default backend.
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    for step in range(10):
        forward(torch.tensor([1, 2, step], device=device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return rows_of(model.embedding, list(range(12))), model.embedding.counters(), frames


def test_a_compiled_model_trains_and_counts_as_another(device_type):
    rows, counts, _ = _train(device_type, compiled=False)
    compiled_rows, compiled_counts, graphs = _train(device_type, compiled=True)
    torch.testing.assert_close(compiled_rows, rows)
    assert compiled_counts == counts
    assert graphs <= 2  # no recompilation in each step
