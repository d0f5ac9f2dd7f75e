"""DistributedDataParallel is refused with one sentence for several processes, and works for one."""

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.support.embeddings import make_embedding, make_tables, rows_of
from torchrec_hkv import HKVOptimizer


def _model(device):
    return torch.nn.Sequential(make_embedding(device=device.type), torch.nn.Linear(4, 1).to(device))


def _refused(rank, world_size, device):
    model = DistributedDataParallel(_model(device))
    try:
        model(torch.arange(3, device=device))
    except RuntimeError as error:
        return str(error)
    return ""


def _tables_refused(rank, world_size, device):
    model = DistributedDataParallel(make_tables(2, device=device.type))
    ids = torch.arange(3, device=device)
    try:
        model([ids, ids])
    except RuntimeError as error:
        return str(error), model.module.counters()["table_0"]["lookups"]
    return "", -1


def _trained(rank, world_size, device):
    model = _model(device)
    wrapped = DistributedDataParallel(model)
    rows, dense = HKVOptimizer(model[0], lr=0.5), torch.optim.SGD(wrapped.parameters(), lr=0.5)
    before = rows_of(model[0], [0, 1, 2])
    gradient = model[1].weight.detach().cpu().clone()
    for _ in range(2):  # the second backward finds all parameters reduced
        wrapped(torch.arange(3, device=device)).sum().backward()
        rows.step()
        rows.zero_grad()
    dense.step()
    return (rows_of(model[0], [0, 1, 2]) - before + gradient).abs().max().item()


def _evaluated(rank, world_size, device):
    model = DistributedDataParallel(_model(device)).eval()
    with torch.no_grad():
        return tuple(model(torch.arange(3, device=device)).shape)


def test_training_on_several_processes_is_refused(run_ranks):
    sentences = run_ranks(2, _refused)
    assert all("shard tables with DistributedModelParallel" in sentence for sentence in sentences)


def test_training_several_tables_is_refused_too(run_ranks):
    for sentence, lookups in run_ranks(2, _tables_refused):
        assert "shard tables with DistributedModelParallel" in sentence
        assert lookups == 0


def test_evaluation_on_several_processes_works(run_ranks):
    assert run_ranks(2, _evaluated) == [(3, 1)] * 2


def test_training_on_one_process_works(run_ranks):
    (difference,) = run_ranks(1, _trained)
    assert difference < 1e-6
