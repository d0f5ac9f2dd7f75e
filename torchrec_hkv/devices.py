"""Devices as users name them."""

from __future__ import annotations

import torch


def known_device(device: torch.device | str) -> torch.device:
    """A device with its index, where it is a GPU.

    Raises:
        ValueError: it is a GPU that torch does not see.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return device
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise ValueError(f"device is '{device}', but torch sees no GPU: use 'cpu'.")
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= gpus:
        raise ValueError(f"device is '{device}', but torch sees {gpus} GPUs, the first 'cuda:0'.")
    return device
