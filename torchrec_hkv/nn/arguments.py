"""Checks of arguments of modules with hash tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.devices import checked_device
from torchrec_hkv.hash_table import EvictionPolicy


def flat_ids(ids: Tensor, device: torch.device) -> Tensor:
    """Ids of any shape as int64 ``[n]``.

    Raises:
        TypeError: the ids are not int64 or int32.
        ValueError: the ids are not on the tables' device.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"ids must be a tensor of int64 or int32, but are {kind}.")
    if ids.device != device:
        raise ValueError(f"ids are on {ids.device}, but the table is on {device}.")
    return ids.reshape(-1).long()


def flat_scores(
    eviction: EvictionPolicy,
    ids: Sequence[Tensor],
    scores: Sequence[Tensor] | None,
    training: bool,
) -> list[Tensor] | None:
    """Scores of ids as int64 ``[n]``, one tensor per table.

    Raises:
        TypeError: the scores are not int64.
        ValueError: scores are missing or not allowed under the policy, or don't match the ids.
    """
    if scores is None:
        if training and eviction == "customized":
            raise ValueError(
                "scores must be given in training under eviction 'customized': one for each id."
            )
        return None
    if eviction != "customized":
        raise ValueError(
            f"scores must not be given under eviction {eviction!r}: only 'customized' takes them."
        )
    for of_ids, part in zip(ids, scores, strict=True):
        if not isinstance(part, Tensor) or part.dtype != torch.int64:
            kind = part.dtype if isinstance(part, Tensor) else type(part).__name__
            raise TypeError(f"scores must be a tensor of int64, but are {kind}.")
        if part.shape != of_ids.shape or part.device != of_ids.device:
            raise ValueError(
                f"scores must have the shape {tuple(of_ids.shape)} of the ids and be on "
                f"{of_ids.device}, but have {tuple(part.shape)} and are on {part.device}."
            )
    return [part.detach().reshape(-1) for part in scores]


def check_rate(name: str, value: object, *, or_tensor: bool = False) -> None:
    """Raises ValueError if a value is not a learning rate.

    With ``or_tensor`` it may be a tensor of one value. The value of a tensor on a GPU is not
    checked, because reading it would wait for the device.
    """
    if or_tensor and isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{name} is a tensor of shape {tuple(value.shape)}, but must have one value."
            )
        if value.device.type != "cpu":
            return
        value = value.item()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < float("inf"):
        raise ValueError(f"{name} is {value!r}, but must be a finite number, not negative.")


def check_int(name: str, value: object, minimum: int, maximum: int) -> None:
    """Raises ValueError if a value is not an integer from ``minimum`` to ``maximum``."""
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise ValueError(
            f"{name} is {value!r}, but must be an integer from {minimum} to {maximum}."
        )


def check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises ValueError if a tensor has another dtype or shape."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} must be {dtype} of shape {shape}, but is {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}."
        )


def device_or_default(device: torch.device | str | None) -> torch.device:
    """The device of tables; by default a GPU, if there is one and kernels for it are built."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() and _C.has_cuda else "cpu"
    return checked_device(device)
