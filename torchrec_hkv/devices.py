"""Conversion of device arguments."""

from __future__ import annotations

import torch


def checked_device(device: torch.device | str) -> torch.device:
    """Converts to a device, with an index for a GPU.

    Raises:
        ValueError: torch does not see the GPU.
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
