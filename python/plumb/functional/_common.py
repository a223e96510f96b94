"""Helpers that the functions of this package share."""

from __future__ import annotations

from typing import Callable, Optional, Sequence, Tuple

from ..constraints import Constraint, _check_name, apply_constraint

ScalePower = Tuple[float, float, float]
HALF: ScalePower = (0.5, 0.5, 0.5)
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def tie(constraint: Constraint, count: int, rule: Callable[[], Sequence[float]]) -> dict:
    """The operator's arguments for a constraint: its name, or the scales that a function of the user's makes."""
    if constraint is None or isinstance(constraint, str):
        if constraint:
            _check_name(constraint)
        return {"constraint": constraint}
    scales = list(rule())
    scales[:count] = apply_constraint(constraint, *scales[:count])
    return {"constraint": None, "scales": scales}


def refuse(function: str, **arguments: object) -> None:
    for name, value in arguments.items():
        if value not in (None, False):
            raise ValueError(f"{function} has no unit-scaled form with {name}={value!r}; leave {name} at its default.")


def reduction_code(function: str, reduction: str, size_average: Optional[bool], reduce: Optional[bool]) -> int:
    refuse(function, size_average=size_average, reduce=reduce)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{function}: reduction must be one of {', '.join(_REDUCTIONS)}, not {reduction!r}.")
    return _REDUCTIONS[reduction]
