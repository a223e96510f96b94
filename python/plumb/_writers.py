"""Where a :class:`plumb.Recorder` tells its numbers besides its history: TensorBoard and Weights & Biases."""

from __future__ import annotations

import math
import os
import pathlib
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ._errors import Error

if TYPE_CHECKING:
    from ._recorder import History

STATISTICS = ("std", "abs_max")


def _numbers(scalars: Mapping[str, float], rows: History | None, statistics: Iterable[str]) -> dict[str, float]:
    """Scalars by their names, and "values.std/layers.0.weight", "gradients.std/layers.0.weight" for what was recorded."""
    numbers = dict(scalars)
    for statistic in statistics if rows is not None else ():
        for row, value in enumerate(rows.statistic(statistic)):
            if not math.isnan(value):
                numbers[f"{_kind(rows, row)}.{statistic}/{_name(rows, row)}"] = float(value)
    return numbers


def _magnitudes(rows: History | None) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Counts of elements by log2 of their magnitude, and the edges between them, of rows with a histogram; without zeros,
    NaN and infinities."""
    found = {}
    for row, bins in enumerate(rows.histograms() if rows is not None else ()):
        finite = np.nonzero(bins[1:255] > 0)[0]
        if bins[0] >= 0 and len(finite):
            low, high = int(finite[0]), int(finite[-1]) + 1
            edges = np.arange(low - 126, high - 125, dtype=np.float64)
            found[f"{_kind(rows, row)}.log2/{_name(rows, row)}"] = (bins[1 + low : 1 + high], edges)
    return found


def _kind(rows: History, row: int) -> str:
    return "gradients" if rows.columns["backward"][row] else "values"


def _name(rows: History, row: int) -> str:
    tensor = rows.tensors[rows.columns["tensor"][row]]
    return tensor["name"] if tensor["stage"] is None else f"stage {tensor['stage']}/{tensor['name']}"


class WandbWriter:
    """Logs every step to a run of Weights & Biases.

    ::

        recorder = plumb.Recorder(model, 10, "run.history", writers=[plumb.WandbWriter(wandb.init(project="fp8"))])

    Scalars keep their names; a tensor's statistics are ``values.std/NAME`` and ``gradients.std/NAME``, its magnitudes as a
    histogram over powers of two ``values.log2/NAME`` (with `histograms`, where rules record them).
    """

    def __init__(self, run: Any, statistics: Iterable[str] = STATISTICS, histograms: bool = False) -> None:
        if not callable(getattr(run, "log", None)):
            raise Error(f"a run of wandb has log(), {type(run).__name__} has none", remedy="wandb.init(project=...)")
        self._run, self._statistics, self._histograms = run, tuple(statistics), histograms

    def write(self, step: int, scalars: Mapping[str, float], rows: History | None) -> None:
        numbers: dict[str, Any] = _numbers(scalars, rows, self._statistics)
        if self._histograms:
            from wandb import Histogram

            numbers |= {tag: Histogram(np_histogram=pair) for tag, pair in _magnitudes(rows).items()}
        if numbers:
            self._run.log(numbers, step=step)

    def close(self) -> None:
        """Does nothing: the run is its owner's."""


class TensorBoardWriter:
    """Writes every step to a file of events in `folder`, for TensorBoard; needs neither TensorBoard nor TensorFlow.

    ::

        recorder = plumb.Recorder(model, 10, "run.history", writers=[plumb.TensorBoardWriter("runs/fp8")])

    Scalars keep their names; a tensor's statistics are ``values.std/NAME`` and ``gradients.std/NAME``, its magnitudes as a
    histogram over powers of two ``values.log2/NAME`` (with `histograms`, where rules record them). Each step reaches the
    system when it is written.
    """

    def __init__(self, folder: str | os.PathLike, statistics: Iterable[str] = STATISTICS, histograms: bool = True) -> None:
        self._statistics, self._histograms = tuple(statistics), histograms
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        try:
            pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = open(pathlib.Path(folder) / name, "xb", buffering=0)  # noqa: SIM115 (kept open)
        except OSError as error:
            raise Error(f"events cannot be written to {os.fspath(folder)}: {error.strerror}", remedy="another folder") from error
        self._event(_text(3, b"brain.Event:2"))

    def write(self, step: int, scalars: Mapping[str, float], rows: History | None) -> None:
        values = [
            _text(1, _text(1, tag.encode()) + _key(2, 5) + struct.pack("<f", value))
            for tag, value in _numbers(scalars, rows, self._statistics).items()
        ]
        if self._histograms:
            values += [
                _text(1, _text(1, tag.encode()) + _text(5, _histogram(counts, edges)))
                for tag, (counts, edges) in _magnitudes(rows).items()
            ]
        if values:
            self._event(_key(2, 0) + _varint(step) + _text(5, b"".join(values)))

    def close(self) -> None:
        self._file.close()

    def _event(self, fields: bytes) -> None:
        # A record of TFRecord: length and data, each with a masked checksum.
        data = _key(1, 1) + struct.pack("<d", time.time()) + fields
        length = struct.pack("<Q", len(data))
        self._file.write(length + _checksum(length) + data + _checksum(data))


# --- the wire format of protocol buffers, as far as event.proto and summary.proto of TensorBoard need it


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _text(field: int, data: bytes) -> bytes:
    return _key(field, 2) + _varint(len(data)) + data


def _histogram(counts: np.ndarray, edges: np.ndarray) -> bytes:
    """HistogramProto: min, max, num, sum, sum of squares (of the bins' middles), upper edges, counts."""
    total, middles = float(counts.sum()), edges[:-1] + 0.5
    facts = (edges[0], edges[-1], total, float(counts @ middles), float(counts @ middles**2))
    head = b"".join(_key(field, 1) + struct.pack("<d", value) for field, value in enumerate(facts, 1))
    return head + _text(6, edges[1:].astype("<f8").tobytes()) + _text(7, counts.astype("<f8").tobytes())


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC_TABLE = _crc_table()


def _checksum(data: bytes) -> bytes:
    """CRC-32C, masked as in TFRecord."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
