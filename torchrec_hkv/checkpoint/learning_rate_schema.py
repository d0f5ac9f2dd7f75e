"""Schema of the learning rates in a checkpoint's record. Does not need TorchRec."""

from __future__ import annotations

from typing import Any

from torchrec_hkv.json_schema import Fields, JsonPlace, Number, OrNull, Schema

#: Values of a parameter group that schedulers of torch.optim change or store there.
SCHEDULED = ("lr", "initial_lr", "momentum", "betas")


class _Rate(Schema):
    """A number or null, or a list of these."""

    allowed = "a finite number, null, or a list of these"
    _one = OrNull(Number())

    def read(self, value: object, place: JsonPlace) -> Any:
        if type(value) is list:
            return [self._one.read(item, place.at(i)) for i, item in enumerate(value)]
        if value is not None and type(value) not in (int, float):
            raise place.refuse(value, self.allowed)
        return self._one.read(value, place)


#: The values that a checkpoint's record has for a parameter.
RATES = Fields({key: _Rate() for key in SCHEDULED}, optional=SCHEDULED)
