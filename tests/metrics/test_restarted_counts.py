"""Metrics since the last reading are not negative if a module was loaded and counts anew."""

import torch

from torchrec_hkv import HierarchicalHashEmbedding, HKVOptimizer
from torchrec_hkv.metrics import ConsoleLine, TensorBoard, Watch


class _Writer:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, step):
        self.scalars[step, tag] = value

    def close(self):
        pass


def test_counts_after_a_load(device_type):
    embedding = HierarchicalHashEmbedding(4, 1000, device=device_type)
    optimizer = HKVOptimizer([embedding], lr=0.1)
    writer, line = _Writer(), ConsoleLine("training", shown=False)
    watch = Watch(embedding, every=1, sinks=[TensorBoard(writer=writer), line])
    ids = torch.arange(100, device=device_type)

    def step(of):
        embedding(of).sum().backward()
        optimizer.step()
        watch.step()
        watch.close()

    step(ids)
    step(ids + 100)
    embedding.load_state_dict(embedding.state_dict())
    step(ids[:50])
    assert writer.scalars[3, "embedding/lookups"] == 50
    assert writer.scalars[3, "embedding/hit_rate"] == 1
    assert line.line.startswith("hit rate 100.0%")
