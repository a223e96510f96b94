"""How far a training is: a bar in a terminal, and one in a notebook."""

from __future__ import annotations

import os
import sys
import time
from html import escape
from typing import Any, Mapping

_WIDTH = 30
_EVERY = 0.1  # seconds between two pictures


def _notebook() -> Any:
    """Returns the object that shows HTML in the notebook that this runs in; None elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)
    return lambda text: handle.update(HTML(text))


def progress() -> Progress | None:
    """For the process that a user looks at: none without a terminal or a notebook, and on all ranks but the first."""
    if os.environ.get("RANK", "0") != "0":
        return None
    show = _notebook()
    return Progress(show) if show is not None or sys.stderr.isatty() else None


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours = f"{whole // 3600}:{whole // 60 % 60:02d}" if whole >= 3600 else str(whole // 60)
    return f"{hours}:{whole % 60:02d}"


class Progress:
    """Draws each step: with `show`, which takes HTML, else on standard error."""

    def __init__(self, show: Any = None):
        self._show, self._began, self._first, self._drawn = show, time.monotonic(), 0, 0.0
        self._last: Mapping[str, Any] | None = None

    def step(self, event: Mapping[str, Any]) -> None:
        now, begins = time.monotonic(), self._last is None
        if begins:
            self._began, self._first = now, event["step"]
        self._last = event
        if begins or now - self._drawn >= _EVERY or event["step"] >= event["steps"]:
            self._drawn = now
            self._draw(event, now)

    def close(self) -> None:
        """The last picture stays."""
        if self._last is not None:
            self._draw(self._last, time.monotonic())
            if self._show is None:
                sys.stderr.write("\n")
                sys.stderr.flush()

    def _draw(self, event: Mapping[str, Any], now: float) -> None:
        done, total = event["step"], max(event["steps"], 1)
        facts = [f"{done}/{total}", f"loss {event['loss']:.4g}" if event.get("loss") is not None else ""]
        if done > self._first and done < total:
            facts.append(f"{_duration((now - self._began) / (done - self._first) * (total - done))} left")
        elif done >= total:
            facts.append(_duration(now - self._began))
        text = "  ".join(filter(None, facts))
        if self._show is not None:
            self._show(f'<progress value="{int(done)}" max="{int(total)}"></progress> <code>{escape(text)}</code>')
            return
        full = _WIDTH * min(done, total) // total
        sys.stderr.write(f"\r[{'#' * full}{' ' * (_WIDTH - full)}] {text}\x1b[K")
        sys.stderr.flush()
