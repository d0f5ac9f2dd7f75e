"""Folders that :mod:`torch.distributed.checkpoint` wrote, which hold a ``state_dict``."""

from __future__ import annotations

from pathlib import Path

from torchrec_hkv.checkpoint.record import RECORD, TENSORS

#: The file that describes all others of such a folder.
_METADATA = ".metadata"


def refuse_dcp_folder(path: Path) -> None:
    """Says how a folder is loaded that :mod:`torch.distributed.checkpoint` wrote.

    Raises:
        ValueError: it is one.
    """
    if not (path / _METADATA).is_file():
        return
    if path.name == TENSORS and (path.parent / RECORD).is_file():
        raise ValueError(f"{path} is a part of a checkpoint: name {path.parent}.")
    raise ValueError(
        f"{path} holds a state_dict that torch.distributed.checkpoint saved: load it by "
        f"state = model.state_dict(); torch.distributed.checkpoint.load(state, "
        f"checkpoint_id={str(path)!r}); model.load_state_dict(state), into stock tables where it "
        "comes from these, or hash tables with dense=True."
    )
