"""What the unit-scaled functions are made of."""

from . import functional

__all__ = ["functional"]
