"""Conversion of device arguments."""

from __future__ import annotations

import torch


def checked_device(device: torch.device | str) -> torch.device:
    """Converts to a device, with an index for a GPU and without one for a CPU.

    Raises:
        ValueError: it is no device, or torch does not see the GPU.
    """
    if not isinstance(device, torch.device):
        try:
            if not isinstance(device, str):
                raise TypeError(type(device).__name__)
            device = torch.device(device)
        except (RuntimeError, TypeError):
            raise ValueError(
                f"device is {device!r}, but must be a CPU or a CUDA device, such as 'cpu' or "
                "'cuda:0'."
            ) from None
    if device.type == "cpu":
        return torch.device("cpu")  # the device of tensors that were made on "cpu:0"
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
