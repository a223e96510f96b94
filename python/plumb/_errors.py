"""The error that plumb raises."""

from __future__ import annotations

from . import _C
from ._C import ErrorKind


class Error(RuntimeError):
    """Everything that plumb refuses or fails at.

    ``str(error)`` is the message, then a line ``at: where`` and a line ``try: remedy``, if they are known.

    Args:
        message: one sentence that names the operator, module, parameter or file.
        kind: a :class:`plumb.ErrorKind`; that of the class if left out.
        where: the module's path and the user's source line, as in ``layers.0.attn (model.py:12)``.
        remedy: what to do about it.

    Attributes:
        kind: a :class:`plumb.ErrorKind`. Decide by it, not by the text.
        message: the sentence alone.
        where: the place, or ``""``.
        remedy: what to do, or ``""``.

    Example::

        try:
            graph = plumb.capture(model, x)
        except plumb.Error as error:
            if error.kind is not plumb.ErrorKind.DataDependent:
                raise
            print(f"{error.where}: {error.remedy}")
    """

    default_kind = ErrorKind.InvalidArgument  # kind of this class's errors, if none is given

    def __init__(
        self, message: str = "", *, kind: ErrorKind | None = None, where: str = "", remedy: str = ""
    ) -> None:
        # Texts of a model or of a file's name may hold surrogates, which UTF-8 has not.
        message, where, remedy = (text.encode(errors="backslashreplace").decode() for text in (message, where, remedy))
        super().__init__(_C.error_text(message, where, remedy))
        self.message, self.where, self.remedy = message, where, remedy
        self._kind = (self.default_kind if kind is None else kind).name

    @property
    def kind(self) -> ErrorKind:
        return getattr(ErrorKind, self._kind)  # the one object of this kind, so that `is` holds


class InvalidType(Error, TypeError):
    """An argument of a type that makes no sense."""


_C.set_error_class(Error)  # what the engine throws becomes one of these
