"""The parts of the unit-scaled functions."""

from . import functional

__all__ = ["functional"]
