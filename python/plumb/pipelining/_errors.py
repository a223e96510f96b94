"""plumb's error, also as the built-in types that users of ``torch.distributed.pipelining`` catch."""

from .._errors import Error, ErrorKind


class InvalidSchedule(Error, AssertionError):
    """A table that cannot run."""

    default_kind = ErrorKind.Schedule


class InvalidValue(Error, ValueError):
    """An argument with a value that makes no sense."""


class InvalidType(Error, TypeError):
    """An argument of a type that makes no sense."""


class PipeliningMetadataError(Error):
    """A value between stages is not like the first microbatch's."""

    default_kind = ErrorKind.TensorMismatch


PipeliningShapeError = PipeliningMetadataError  # its name until torch 2.10
