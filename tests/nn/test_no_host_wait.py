"""Warm steps on a GPU do not make the host wait, once the table has its full capacity."""

import contextlib

import pytest
import torch

from tests.support.embeddings import make_embedding, make_tables
from tests.support.gpu import NEEDS_GPU, no_waits
from torchrec_hkv import HKVAdagrad, HKVAdamOptimizer, HKVOptimizer, HKVSparseAdam

pytestmark = NEEDS_GPU

OPTIMIZERS = [HKVOptimizer, HKVAdamOptimizer, HKVAdagrad, HKVSparseAdam]
WHOLE = 4096


def batches():
    for seed in range(6):
        generator = torch.Generator("cuda").manual_seed(seed)
        yield torch.randint(20_000, (2, 700), device="cuda", generator=generator)


def check(forward, optimizer):
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step, ids in enumerate(batches()):
        with no_waits() if step > 1 else contextlib.nullcontext():
            for part in ids:  # two backwards per step
                forward(part).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_steps_of_one_table(optimizer, padding_idx):
    embedding = make_embedding(8, "cuda", init_capacity=WHOLE, padding_idx=padding_idx)
    check(embedding, optimizer(embedding))


def test_steps_of_several_tables():
    tables = make_tables(2, 8, "cuda", init_capacity_per_table=WHOLE)
    check(lambda ids: sum(tables([ids, ids[:100]])[1:]), HKVAdamOptimizer(tables))


def test_steps_of_a_scaler():
    embedding = make_embedding(8, "cuda", init_capacity=WHOLE)
    optimizer = HKVAdamOptimizer(embedding)
    scaler = torch.amp.GradScaler("cuda")
    for step, ids in enumerate(batches()):
        with no_waits() if step > 1 else contextlib.nullcontext():
            scaler.scale(embedding(ids).sum()).backward()
            scaler.step(optimizer)
        scaler.update()


def test_evaluation():
    embedding = make_embedding(8, "cuda", init_capacity=WHOLE).eval()
    for step, ids in enumerate(batches()):
        with no_waits() if step > 1 else contextlib.nullcontext():
            embedding(ids)
