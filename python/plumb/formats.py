"""Number formats that tensors can be rounded to.

``FPFormat(4, 3)`` is of the family in which every code is a finite number: E4M3 reaches 240. The hardware's formats have
names: ``FPFormat.named("e4m3fn", rounding="nearest")``. In the MX formats (``mxfp8``, ``mxfp8e5m2``, ``mxfp6``,
``mxfp6e3m2``, ``mxfp4``) and in ``nvfp4`` neighbors along one dimension share a scale. Rounding is done by ``torch.ops.plumb.quantise`` and
``torch.ops.plumb.simulate_format``, on tensors of float32, float64, float16 and bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional, Tuple

from torch import Tensor

from . import _C
from ._arguments import checked
from ._errors import Error
from ._ops import ops


@checked
@dataclass
class FPFormat:
    """A floating-point format of one sign bit and these many exponent and mantissa bits.

    Args:
        exponent_bits: 2 to 8.
        mantissa_bits: 0 to 23.
        rounding: ``"stochastic"``, ``"nearest"`` (ties to the even code) or ``"toward_zero"``.
        srbits: random bits of stochastic rounding; 0 means all of them, and for the other roundings it must be 0.
        name: one of :func:`standard_format_names`, or ``""`` for the family without infinities and NaN; see :meth:`named`.
        saturate: whether what lies beyond the largest value becomes that value (True) or infinity, NaN where the format
            has no infinity (False). None, the default, is the format's own habit, and reads as that afterwards.

    Raises :class:`plumb.Error` for bits out of range.
    """

    exponent_bits: int
    mantissa_bits: int
    rounding: str = "stochastic"
    srbits: int = 0
    name: str = ""
    saturate: Optional[bool] = None
    _facts: dict = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.saturate is None or isinstance(self.saturate, bool)):
            raise Error(f"saturate is {self.saturate!r}", remedy="True, False, or None for the format's own habit")
        facts = _C.plain_format(self.exponent_bits, self.mantissa_bits, self.rounding, self.srbits)
        if self.name or self.saturate is not None:
            suffix = facts["text"].partition("-")[2]
            beyond = {None: "", True: "-sat", False: "-inf"}[self.saturate]
            facts = _C.parse_format(f"{self.name or facts['name']}-{suffix}{beyond}")
            if (facts["exponent_bits"], facts["mantissa_bits"]) != (self.exponent_bits, self.mantissa_bits):
                raise Error(
                    f"{self.name} has {facts['exponent_bits']} exponent and {facts['mantissa_bits']} mantissa bits, not "
                    f"{self.exponent_bits} and {self.mantissa_bits}",
                    remedy=f"FPFormat.named({self.name!r})",
                )
        self.rounding, self.srbits, self.saturate = facts["rounding"], facts["srbits"], facts["saturate"]
        self._facts = facts

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_facts"):  # nothing would read it: spec stands
            raise Error(
                f"a format stays as it is made: {name} of {self.spec} is not set to {value!r}",
                remedy='make another: FPFormat(4, 3, "nearest"), or FPFormat.parse("e4m3fn-RN")',
            )
        object.__setattr__(self, name, value)

    @classmethod
    @checked
    def named(
        cls, name: str, rounding: str = "stochastic", srbits: int = 0, saturate: Optional[bool] = None
    ) -> FPFormat:
        """Returns a standard format: ``e4m3fn`` (max 448), ``e5m2``, ``fp16``, ``bf16``, ``mxfp8``, ``nvfp4``, ... or
        ``E4M3`` of the plain family. Raises :class:`plumb.Error` for a text that says a rounding, too: :meth:`parse` reads
        it."""
        facts = _C.parse_format(name)
        if "-" in name:
            raise Error(f"{name!r} is a format with its rounding, not a name", remedy=f"FPFormat.parse({name!r})")
        plain = facts["name"].startswith("E")
        return cls(facts["exponent_bits"], facts["mantissa_bits"], rounding, srbits, "" if plain else facts["name"], saturate)

    @classmethod
    @checked
    def parse(cls, text: str) -> FPFormat:
        """Reads ``NAME[-RN|-SR|-SRn|-RZ][-sat|-inf]``, to nearest when nothing is said: ``"e4m3fn"``, ``"E5M2-SR8"``,
        ``"e5m2-RN-inf"``."""
        facts = _C.parse_format(text)
        return cls.named(facts["name"], facts["rounding"], facts["srbits"], facts["saturate"])

    @property
    def spec(self) -> str:
        """The format and all of its rounding, as the operators take it: ``"E4M3-SR8"``."""
        return self._facts["text"]

    @property
    def bits(self) -> int:
        """How many bits one value takes, without a share in its block's scale."""
        return self._facts["bits"]

    @property
    def block_size(self) -> int:
        """How many neighbors share a scale; 0 where none do. Ranges below are then those of the elements: of a value
        divided by its block's scale."""
        return self._facts["block_size"]

    @property
    def max_absolute_value(self) -> float:
        """The largest finite value; what lies beyond is rounded to it, or to infinity (see `saturate`)."""
        return self._facts["max_absolute_value"]

    @property
    def min_absolute_normal(self) -> float:
        """The smallest value with a full mantissa."""
        return self._facts["min_absolute_normal"]

    @property
    def min_absolute_subnormal(self) -> float:
        """The smallest value above zero."""
        return self._facts["min_absolute_subnormal"]

    def __str__(self) -> str:
        return self.spec

    @checked
    def quantise(self, x: Tensor, seed: Optional[int] = None, dim: int = -1) -> Tensor:
        """`x` rounded to the format's values, in a tensor of its own dtype, outside of autograd.

        seed: of the random bits; without one they come from torch's generator. dim: along which blocks share a scale,
        where they do."""
        return ops.quantise(x.detach(), self.spec, seed=seed, dim=dim)

    def quantise_fwd(self, x: Tensor, dim: int = -1) -> Tensor:
        """`x` rounded; the gradient passes unchanged."""
        return ops.quantise(x, self.spec, dim=dim)

    def quantise_bwd(self, x: Tensor, dim: int = -1) -> Tensor:
        """`x` unchanged; its gradient is rounded."""
        return ops.simulate_format(x, "none", self.spec, dim=dim)

    # The same in torch's spelling; the names above are unit-scaling's.
    quantize, quantize_fwd, quantize_bwd = quantise, quantise_fwd, quantise_bwd


def format_to_tuple(format: FPFormat) -> Tuple[int, int]:
    """``(exponent_bits, mantissa_bits)``: rounding and name are not in it."""
    return (format.exponent_bits, format.mantissa_bits)


def tuple_to_format(t: Tuple[int, int]) -> FPFormat:
    """Returns the plain format of ``(exponent_bits, mantissa_bits)``, rounded stochastically."""
    return FPFormat(*t)


def standard_format_names() -> list[str]:
    """Returns names that :meth:`FPFormat.named` takes beside ``E<e>M<m>``."""
    return _C.standard_format_names().split()


def format_text(format: Any) -> str:
    """A format in the operators' own text: of an :class:`FPFormat`, or of a text that is checked; ``"none"`` stays."""
    if isinstance(format, FPFormat):
        return format.spec
    if not isinstance(format, str):
        raise TypeError(f"a format is a plumb.formats.FPFormat or a text such as 'e4m3fn-RN', not {format!r}")
    return format if format == "none" else _C.parse_format(format)["text"]


__all__ = ["FPFormat", "format_to_tuple", "standard_format_names", "tuple_to_format"]
