"""What a rank has to know of the whole pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from .. import _C
from ._errors import PipeliningMetadataError, PipeliningShapeError  # noqa: F401  (caught by users of torch's)


@dataclass
class PipeInfo:
    """The picture of a cut model without the model: it keeps no stage alive, and may be sent to other ranks."""

    graph: fx.Graph  # inputs, one call a stage, the backward if there is one, output
    num_stages: int
    has_loss_and_backward: bool
    table: Any = field(default=None, repr=False)  # plumb._C.PipeTable: where every stage's inputs come from
    input_names: list[tuple[str, int]] = field(default_factory=list, repr=False)  # of each flat input: argument, leaf
    stages_here: set[int] = field(default_factory=set, repr=False)  # that were built here for a schedule over several ranks

    @property
    def layout(self) -> Any:
        """The table as the runtime takes it."""
        return _C.PipelineLayout.of(self.table)
