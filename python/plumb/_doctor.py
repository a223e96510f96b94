"""plumb.doctor()."""

from html import escape
from typing import NamedTuple

from . import _C


class Finding(NamedTuple):
    """A line of doctor()'s page."""

    topic: str
    found: str
    remedy: str
    """Empty if nothing is wrong."""


class Doctor(list[Finding]):
    """The findings of doctor(); prints as a page."""

    page: str

    def __repr__(self) -> str:
        return self.page

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.page)}</pre>"


def doctor() -> Doctor:
    """Looks at the CPU, threads, torch, devices with their kernels, Gloo and NCCL.

    Runs every kind of kernel once on each CUDA device, on small tensors, beside the CPU's. A report of a fault begins
    with what this prints. The command is ``plumb doctor``.

    Returns:
        A list of findings, which prints as a page. What fails is a finding with a remedy; nothing is raised.
    """
    findings, page = _C.doctor()
    found = Doctor(Finding(*finding) for finding in findings)
    found.page = page.rstrip("\n")
    return found
