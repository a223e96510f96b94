"""Constraints tie the scales of one operator together, so that its gradients stay those of one function.

An operator takes a constraint by name, ``None`` for none, or any function of its scales (output first, then one for each
constrained input's gradient) that returns the one scale to use.
"""

from __future__ import annotations

from math import isfinite, prod
from typing import Callable, Tuple, Union

Constraint = Union[None, str, Callable[..., float]]


def gmean(*scales: float) -> float:
    """Geometric mean: shares the error between the forward and the backward pass."""
    return prod(scales) ** (1 / len(scales))


def hmean(*scales: float) -> float:
    """Harmonic mean, as in Glorot's initialization."""
    return len(scales) / sum(1 / s for s in scales)


def amean(*scales: float) -> float:
    """Arithmetic mean."""
    return sum(scales) / len(scales)


def to_output_scale(output_scale: float, *grad_input_scale: float) -> float:
    """Returns the scale with which the forward pass is right; the gradients follow."""
    return output_scale


def to_grad_input_scale(output_scale: float, grad_input_scale: float) -> float:
    """Returns the scale with which the gradient of the one input is right; the output follows."""
    return grad_input_scale


def to_left_grad_scale(output_scale: float, left_grad_scale: float, right_grad_scale: float) -> float:
    """Returns the scale with which the gradient of the left input is right; the rest follows."""
    return left_grad_scale


def to_right_grad_scale(output_scale: float, left_grad_scale: float, right_grad_scale: float) -> float:
    """Returns the scale with which the gradient of the right input is right; the rest follows."""
    return right_grad_scale


_NAMED = {
    f.__name__: f
    for f in (
        gmean,
        hmean,
        amean,
        to_output_scale,
        to_grad_input_scale,
        to_left_grad_scale,
        to_right_grad_scale,
    )
}


def _check_name(name: str) -> None:
    if name not in _NAMED:
        raise ValueError(f"There is no constraint named {name!r}; use one of {', '.join(_NAMED)}, None, or a function.")


def apply_constraint(constraint_name: Constraint, *scales: float) -> Tuple[float, ...]:
    """Returns the scales after the constraint: all equal, or as they are without one.

    Raises ValueError for an unknown name, and for a scale that is not finite."""
    if constraint_name is None or constraint_name == "":
        return scales
    if not callable(constraint_name):
        _check_name(constraint_name)
    scale = (constraint_name if callable(constraint_name) else _NAMED[constraint_name])(*scales)
    if not isfinite(scale):
        raise ValueError(f"The constraint {constraint_name!r} returns {scale} for the scales {scales}; return one finite scale.")
    return (scale,) * len(scales)


__all__ = [*_NAMED, "apply_constraint"]
