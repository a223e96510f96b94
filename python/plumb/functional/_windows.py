"""Convolutions and pooling: one function for each number of dimensions."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Union

from torch import Tensor

from .._ops import ops
from ..constraints import Constraint, _check_name
from ._common import HALF, ScalePower, tie

Size = Union[int, Sequence[int]]


def _sizes(value: Optional[Size]) -> List[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _named(function: Callable[..., Any], name: str, doc: str) -> Callable[..., Any]:
    """Gives a function this name, as if it had been written out: tracers and pickle look at all of these."""
    function.__name__ = function.__qualname__ = name
    function.__module__ = "plumb.functional"
    function.__doc__ = doc
    function.__code__ = function.__code__.replace(co_name=name)
    return function


def _conv(dimensions: int) -> Callable[..., Tensor]:
    name = f"conv{dimensions}d"
    packet, scales = getattr(ops, name), getattr(ops, name + "_scales")

    def conv(
        input: Tensor,
        weight: Tensor,
        bias: Optional[Tensor] = None,
        stride: Size = 1,
        padding: Union[str, Size] = 0,
        dilation: Size = 1,
        groups: int = 1,
        constraint: Constraint = "to_output_scale",
        scale_power: ScalePower = HALF,
    ) -> Tensor:
        stride, dilation, named = _sizes(stride), _sizes(dilation), isinstance(padding, str)
        padding = padding if named else _sizes(padding)
        around = [0] if named else padding
        tied = tie(constraint, 2, lambda: scales(input, weight, stride, around, dilation, groups, scale_power=scale_power))
        op = packet.padding if named else packet.default
        return op(input, weight, bias, stride, padding, dilation, groups, scale_power=scale_power, **tied)

    return _named(conv, name, f'{dimensions}-D convolution; sizes may be tuples, padding also ``"same"`` or ``"valid"``.')


def _conv_transpose(dimensions: int) -> Callable[..., Tensor]:
    name = f"conv_transpose{dimensions}d"
    op = getattr(ops, name)

    def conv_transpose(
        input: Tensor,
        weight: Tensor,
        bias: Optional[Tensor] = None,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        dilation: Size = 1,
        constraint: Optional[str] = "to_output_scale",
        scale_power: ScalePower = HALF,
    ) -> Tensor:
        if constraint:
            _check_name(constraint)
        sizes = [_sizes(stride), _sizes(padding), _sizes(output_padding), groups, _sizes(dilation)]
        return op(input, weight, bias, *sizes, constraint=constraint, scale_power=scale_power)

    return _named(conv_transpose, name, f"{dimensions}-D transposed convolution; weight is ``(in, out / groups, kernel...)``.")


def _avg_pool(dimensions: int) -> Callable[..., Tensor]:
    name = f"avg_pool{dimensions}d"
    op = getattr(ops, name)

    def avg_pool(
        input: Tensor,
        kernel_size: Size,
        stride: Optional[Size] = None,
        padding: Size = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        constraint: Optional[str] = "to_output_scale",
    ) -> Tensor:
        sizes = [_sizes(kernel_size), _sizes(stride), _sizes(padding)]
        return op(input, *sizes, ceil_mode, count_include_pad, constraint=constraint)

    return _named(avg_pool, name, "Mean over windows, which of k values has the scale 1 / sqrt(k).")


def _max_pool(dimensions: int) -> Callable[..., Tensor]:
    name = f"max_pool{dimensions}d"
    op = getattr(ops, name)

    def max_pool(
        input: Tensor,
        kernel_size: Size,
        stride: Optional[Size] = None,
        padding: Size = 0,
        dilation: Size = 1,
        ceil_mode: bool = False,
        constraint: Optional[str] = "to_output_scale",
    ) -> Tensor:
        sizes = [_sizes(kernel_size), _sizes(stride), _sizes(padding), _sizes(dilation)]
        return op(input, *sizes, ceil_mode, constraint=constraint)

    return _named(max_pool, name, "Largest value of each window; the standard deviation is 1, the mean is not 0.")


conv1d = _conv(1)
"""1-D convolution: ``(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, constraint=...)``."""
conv2d = _conv(2)
"""2-D convolution: ``(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, constraint=...)``."""
conv3d = _conv(3)
"""3-D convolution: ``(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, constraint=...)``."""
conv_transpose1d = _conv_transpose(1)
"""1-D transposed convolution: ``(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1,
dilation=1, constraint=...)``."""
conv_transpose2d = _conv_transpose(2)
"""2-D transposed convolution: ``(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1,
dilation=1, constraint=...)``."""
conv_transpose3d = _conv_transpose(3)
"""3-D transposed convolution: ``(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1,
dilation=1, constraint=...)``."""
avg_pool1d = _avg_pool(1)
"""Mean over 1-D windows: ``(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True,
constraint=...)``."""
avg_pool2d = _avg_pool(2)
"""Mean over 2-D windows: ``(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True,
constraint=...)``."""
avg_pool3d = _avg_pool(3)
"""Mean over 3-D windows: ``(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True,
constraint=...)``."""
max_pool1d = _max_pool(1)
"""Largest value of each 1-D window: ``(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False,
constraint=...)``."""
max_pool2d = _max_pool(2)
"""Largest value of each 2-D window: ``(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False,
constraint=...)``."""
max_pool3d = _max_pool(3)
"""Largest value of each 3-D window: ``(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False,
constraint=...)``."""
