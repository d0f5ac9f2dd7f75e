"""The tests run with both layouts."""

from tests.support.layouts import device_type

__all__ = ["device_type"]
