"""The learning rate of rows is a device tensor that follows the parameter group."""

from __future__ import annotations

import torch
from torch import nn

from torchrec_hkv.sharding.kernels.row_optimizer import InBackwardOptimizer


def _make(device, learning_rate=0.5):
    parameters = {"t.weight": nn.Parameter(torch.empty(0, 4))}
    return InBackwardOptimizer(parameters, learning_rate, torch.device(device))


def test_it_follows_a_scheduler(device_type):
    optimizer = _make(device_type)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    tensor = optimizer.learning_rate
    assert (tensor.dtype, tensor.shape, tensor.device.type) == (torch.float32, (), device_type)
    assert float(tensor) == 0.5
    optimizer.step()
    scheduler.step()
    assert float(tensor) == 0.5
    assert optimizer.learning_rate is tensor
    assert float(tensor) == 0.25


def test_step_and_zero_grad_set_it_too(device_type):
    """``step`` and ``zero_grad`` update it, since a loop that replays a CUDA graph calls nothing
    else."""
    optimizer = _make(device_type)
    tensor = optimizer.learning_rate
    for call, value in ((optimizer.step, 0.125), (optimizer.zero_grad, 2.0)):
        optimizer.param_groups[0]["lr"] = value
        call()
        assert float(tensor) == value


def test_it_is_written_only_where_it_changed():
    optimizer = _make("cpu")
    tensor = optimizer.learning_rate
    version = tensor._version
    for _ in range(3):
        optimizer.step()
        _ = optimizer.learning_rate
    assert tensor._version == version


def test_the_parameter_group_may_hold_a_tensor(device_type):
    optimizer = _make(device_type)
    tensor = optimizer.learning_rate
    for device in ("cpu", device_type):
        given = torch.tensor(0.75, device=device)
        optimizer.param_groups[0]["lr"] = given
        assert float(optimizer.learning_rate) == 0.75
        given.mul_(2)
        assert float(optimizer.learning_rate) == 1.5
        optimizer.param_groups[0]["lr"] = 0.25
        assert float(optimizer.learning_rate) == 0.25
    assert optimizer.learning_rate is tensor


def test_a_loaded_state_sets_it(device_type):
    saved, loaded = _make(device_type, 0.125), _make(device_type)
    for optimizer in (saved, loaded):
        optimizer.save_param_groups(True)
    loaded.load_state_dict(saved.state_dict())
    assert float(loaded.learning_rate) == 0.125
