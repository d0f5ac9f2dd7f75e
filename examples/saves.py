"""``--save`` and ``--resume``: checkpoints of an example's model and optimizers."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from click_data import DataError
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from torchrec_hkv import checkpoint


def add_saves(parser: argparse.ArgumentParser, when: str = "after each epoch") -> None:
    """Adds the options.

    Args:
        parser: the parser of the example.
        when: when the example saves, for the help.
    """
    parser.add_argument(
        "--save", type=Path, metavar="FOLDER", help=f"save model and optimizers {when}"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="continue from what --save wrote, with any number of processes",
    )


def check_saves(arguments: argparse.Namespace) -> None:
    """Checks the options before the example starts.

    Raises:
        DataError: a folder is missing, or is a file.
    """
    if arguments.resume and not arguments.resume.is_dir():
        raise DataError(f"--resume is {arguments.resume}, but there is no such folder.")
    if arguments.save and arguments.save.exists() and not arguments.save.is_dir():
        raise DataError(f"--save is {arguments.save}, but that is not a folder.")
    if arguments.save and not arguments.save.absolute().parent.is_dir():
        raise DataError(f"There is no folder {arguments.save.absolute().parent}.")


class Saves:
    """Saves and resumes one run.

    Args:
        model: the sharded model.
        optimizer: the optimizer of the dense parameters.
        name: name of the run, and of its folder in both folders.
        save: the folder of ``--save``, or None.
        resume: the folder of ``--resume``, or None.
        numbers: how many numbers are saved with the model, such as the number of finished epochs.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: KeyedOptimizerWrapper,
        name: str,
        save: Path | None,
        resume: Path | None,
        numbers: int = 1,
    ) -> None:
        self._model = model
        self._optimizer = CombinedOptimizer([model.fused_optimizer, ("dense", optimizer)])
        self._save = save and save / name
        self._resume = resume and resume / name
        device = next(iter(model.parameters())).device
        # As a buffer, it is saved and loaded with the model.
        model.module.register_buffer(
            "saved_numbers", torch.zeros(numbers, dtype=torch.float64, device=device)
        )

    def resume(self) -> list[float]:
        """Loads the checkpoint to resume from, if there is one.

        Returns:
            The saved numbers; zeros if there is nothing to resume from.

        Raises:
            DataError: there is no checkpoint of this run, or it is from another model.
        """
        if self._resume is not None:
            try:
                checkpoint.load(self._resume, self._model, self._optimizer)
            except ValueError as error:
                raise DataError(str(error)) from None
        return self._model.module.saved_numbers.tolist()

    def save(self, *numbers: float) -> None:
        """Saves the model if ``--save`` is given.

        Args:
            numbers: the numbers to save with the model.
        """
        if self._save is None:
            return
        self._model.module.saved_numbers.copy_(torch.tensor(numbers, dtype=torch.float64))
        self._save.parent.mkdir(exist_ok=True)
        checkpoint.save(self._save, self._model, self._optimizer)


def epochs_done(saves: Saves, epochs: int, resume: Path | None) -> int:
    """Resumes a run that saves after each epoch.

    Args:
        saves: the saves of the run.
        epochs: total number of epochs.
        resume: the folder of ``--resume``, for the message.

    Returns:
        The number of epochs that the model has been trained for.

    Raises:
        DataError: no epochs remain, or :meth:`Saves.resume` raises.
    """
    done = int(saves.resume()[0])
    if done >= epochs:
        raise DataError(
            f"--resume is {resume}, which holds the state after {done} of {epochs} epochs: "
            f"give --epochs more than {done}."
        )
    return done
