"""Pictures and tables of a tracked module's scales; needs matplotlib, and pandas for the tables."""

from __future__ import annotations

import logging
import math
import os
import random
import re
from typing import TYPE_CHECKING, Any, Iterable, List, Optional, Sequence, Tuple, Union

from torch import Tensor, nn
from torch.fx import Graph, Node

from .formats import FPFormat
from .transforms import Metrics, prune_non_float_tensors, prune_same_scale_tensors, track_scales

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from typing_extensions import TypeVar

    class OwnAxes(Axes):
        """Axes that fill a figure of their own."""

        figure: Figure

    AnyAxes = TypeVar("AnyAxes", bound=Axes, default=OwnAxes)

logger = logging.getLogger(__name__)

_COLORS = {"fwd": "#0173b2", "bwd": "#de8f05"}
_PALE = {"fwd": "#a9cbe0", "bwd": "#f3d9b0"}
_SHIFT = {"fwd": -0.12, "bwd": 0.12}
_SPOKEN = {"fwd": "forward pass", "bwd": "backward pass"}
_FORMATS = ("fp16", "E5M2", "E4M3")


# --- text


def _texts(dataset_path: Optional[str], dataset_name: Optional[str], buffer: int, seed: int) -> Iterable[str]:
    """Paragraphs of text: Python's own documentation, which every Python has; those of a file or of a folder's files; or a
    dataset by its name, where the package `datasets` is installed."""
    if dataset_path is None:
        from pydoc_data.topics import topics

        return [text for _, text in sorted(topics.items())]
    if os.path.isfile(dataset_path):
        files = [dataset_path]
    elif os.path.isdir(dataset_path):
        files = sorted(os.path.join(dataset_path, f) for f in os.listdir(dataset_path) if f.endswith((".txt", ".md")))
    else:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise ImportError(
                f"{dataset_path!r} is no file or folder here, and the package `datasets`, which could fetch it, is not installed"
            ) from error
        stream = load_dataset(dataset_path, dataset_name, split="test", streaming=True)
        return (row["text"] for row in stream.shuffle(seed=seed, buffer_size=buffer))
    texts = []
    for file in files:
        with open(file, encoding="utf-8", errors="replace") as f:
            texts.append(f.read())
    return texts


def _example_seqs(
    batch_size: int,
    min_seq_len: int,
    dataset_path: Optional[str] = None,
    dataset_name: Optional[str] = None,
    shuffle_buffer_size: int = 10_000,
    seed: int = 1472,
) -> List[str]:
    """`batch_size` pieces of text of at least `min_seq_len` characters each."""
    texts = _texts(dataset_path, dataset_name, shuffle_buffer_size, seed)
    if isinstance(texts, list):
        long = [t for t in texts if len(t) >= min_seq_len]
        if len(long) < batch_size:  # pieces of everything together
            whole = "\n".join(texts)
            size = max(min_seq_len, 1)
            long = [whole[i : i + size] for i in range(0, len(whole) - size + 1, size)]
        texts = random.Random(seed).sample(long, batch_size) if len(long) >= batch_size else []
    found = []
    for text in texts:
        if len(text) >= min_seq_len and not text.isspace():
            found.append(text)
        if len(found) == batch_size:
            return found
    raise ValueError(f"the text gives no {batch_size} pieces of {min_seq_len} characters; ask for less, or give more text")


def _create_batch(tokenizer: Any, seqs: Sequence[str], seq_len: int) -> Tuple[Tensor, Tensor, Tensor]:
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokens = tokenizer(list(seqs), max_length=seq_len + 1, truncation=True, padding=True, return_tensors="pt")
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    return ids[:, :seq_len].clone(), mask[:, :seq_len].clone(), ids[:, 1 : seq_len + 1].clone()


def example_batch(
    tokenizer: Any,
    batch_size: int,
    seq_len: int,
    dataset_path: Optional[str] = None,
    dataset_name: Optional[str] = None,
    shuffle_buffer_size: int = 10_000,
    seed: int = 1472,
) -> Tuple[Tensor, Tensor, Tensor]:
    """Tokens of real text, their attention mask and labels (the next tokens), each ``(batch_size, seq_len)``.

    Args:
        tokenizer: one of `transformers`, or anything called like it.
        dataset_path: a text file, a folder of ``.txt`` and ``.md`` files, or a name that ``datasets.load_dataset`` knows;
            by default Python's own documentation, which needs no network.
        dataset_name: the dataset's configuration.
        shuffle_buffer_size: from how many rows of a dataset the pieces are drawn.
        seed: which pieces are drawn.
    """
    # Four characters a token are plenty of text for every tokenizer of whole words.
    seqs = _example_seqs(batch_size, 4 * seq_len, dataset_path, dataset_name, shuffle_buffer_size, seed)
    return _create_batch(tokenizer, seqs, seq_len)


# --- tables


def _drawn(graph: Graph) -> List[Node]:
    return [n for n in graph.nodes if n.op != "output" and "metrics" in n.meta]


def graph_to_dataframe(g: Graph) -> "pd.DataFrame":
    """Returns a row for each tensor and direction of ``track_scales(module).scales_graph()``.

    Columns: ``layer``, ``weight tensor``, ``direction`` (``fwd``, ``bwd``), ``tensor type`` (``x``, ``w``, ``grad_x``,
    ``grad_w``) and the full names of :class:`plumb.transforms.Metrics`; None where nothing was measured.
    """
    import pandas as pd

    rows = []
    for n in _drawn(g):
        letter = "w" if n.meta["requires_grad"] else "x"
        for direction, prefix in (("fwd", ""), ("bwd", "grad_")):
            data = getattr(n.meta["metrics"], direction)
            values = [None if data is None else getattr(data, m) for m in Metrics.names()]
            rows.append([n.meta["clean_name"], n.meta["requires_grad"], direction, prefix + letter, *values])
    return pd.DataFrame(rows, columns=["layer", "weight tensor", "direction", "tensor type", *Metrics.full_names()])


# --- the picture


def _label(node: Node) -> str:
    name = str(node.target) if node.op == "get_attr" else node.meta["clean_name"]
    # Between two dollars matplotlib sets formulas.
    return re.sub(r"^(transformer\.h\.|transformer\.)", "", name).replace("$", r"\$")


def _point(node: Node, direction: str, metric: str) -> Optional[float]:
    data = getattr(node.meta["metrics"], direction)
    return None if data is None else float(getattr(data, metric))


def _visible(value: Optional[float]) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _draw_ranges(
    axes: "Axes", formats: Sequence[Union[str, FPFormat]], rows: int, ends: Tuple[float, float]
) -> None:
    """Lines and names of what lies between the ends of the axis: a name beyond them would stand outside of the picture."""
    at: dict[float, list[str]] = {}
    for format in formats:
        f = format if isinstance(format, FPFormat) else FPFormat.parse(format)
        name = str(f).partition("-")[0]
        if f.block_size:
            raise ValueError(f"{name} has another range in every block: give formats without shared scales")
        at.setdefault(f.min_absolute_normal, []).append(f"{name} min")
        at.setdefault(f.max_absolute_value, []).append(f"{name} max")
    level = 0
    previous = None
    for x in sorted(x for x in at if ends[0] <= x <= ends[1]):
        axes.axvline(x, color="gray", linewidth=0.8, dashes=(3, 2), zorder=0)
        # Labels of near neighbors go below one another.
        level = (level + 1) % 3 if previous is not None and x / previous < 16 else 0
        axes.text(x, rows - 0.4 + 0.9 * level, "\n".join(at[x]), ha="center", va="top", size=8, color="dimgray")
        previous = x


def _draw_error_bars(axes: "Axes", row: dict[Node, int], directions: Sequence[str]) -> None:
    for n in row:
        for d in directions:
            low, high = _point(n, d, "abs_min"), _point(n, d, "abs_max")
            if _visible(high):
                start = low if _visible(low) else high
                axes.plot([start, high], [row[n] + _SHIFT[d]] * 2, color=_PALE[d], linewidth=1, marker="|", zorder=1)


def _draw_at_the_edges(axes: "Axes", row: dict[Node, int], left_out: Iterable, ends: Tuple[float, float], zeros: bool) -> dict:
    """Writes values that a logarithmic axis does not have at its ends. Returns the position of each."""
    spots = {}
    for n, d, value in left_out:
        if math.isnan(value) or math.isinf(value):
            logger.warning("%s (%s) is %s", n.meta["clean_name"], _SPOKEN[d], value)
        if zeros or not value == 0:
            spots[n, d] = ends[1] if math.isinf(value) else ends[0]
            text = "0" if value == 0 else str(value)
            axes.annotate(text, (spots[n, d], row[n] + _SHIFT[d]), color=_COLORS[d], va="center", size=8)
    return spots


def _draw_arrows(axes: "Axes", row: dict[Node, int], directions: Sequence[str], spots: dict) -> None:
    for n in row:
        for source in n.all_input_nodes:
            for d in directions:
                if (n, d) in spots and (source, d) in spots:
                    a, b = (source, n) if d == "fwd" else (n, source)
                    axes.annotate(
                        "", xy=(spots[b, d], row[b] + _SHIFT[d]), xytext=(spots[a, d], row[a] + _SHIFT[d]), zorder=2,
                        arrowprops={"arrowstyle": "->", "color": _COLORS[d], "linewidth": 0.8, "shrinkA": 2, "shrinkB": 2},
                    )  # fmt: skip


def _draw_legend(axes: "Axes", nodes: Sequence[Node], directions: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=_COLORS[d], marker="o", linestyle="", label=_SPOKEN[d]) for d in directions]
    if any(n.meta["requires_grad"] for n in nodes):
        handles.append(Line2D([], [], color="gray", marker="v", linestyle="", label="weight tensor"))
    if handles:
        axes.legend(handles=handles, loc="upper right")


def plot(
    g: Graph,
    title: str = "",
    metric: str = "mean_abs",
    prune_same_scale: bool = True,
    show_arrows: bool = True,
    show_error_bars: bool = True,
    show_zero_tensors: bool = False,
    xmin: Optional[float] = None,
    xmax: Optional[float] = None,
    formats: Sequence[Union[str, FPFormat]] = _FORMATS,
    ax: Optional["AnyAxes"] = None,
) -> "AnyAxes":
    """Draws the scales of all tensors of ``track_scales(module).scales_graph()``, a row each, forward and backward.

    Args:
        title: above the picture.
        metric: what is on the (log2) axis: one of ``Metrics.names()`` or ``Metrics.full_names()``.
        prune_same_scale: leave out tensors that have the scale of the one they are made of, such as views.
        show_arrows: from each tensor to those made of it, and for gradients the other way round.
        show_error_bars: thin lines from the smallest to the largest element.
        show_zero_tensors: draw tensors of zeros at the left edge.
        xmin, xmax: ends of the axis.
        formats: number formats whose smallest normal and largest values are marked.
        ax: axes to draw on; by default a new figure.

    Returns the axes.
    """
    import matplotlib.pyplot as plt

    if metric in Metrics.full_names():
        metric = Metrics.names()[Metrics.full_names().index(metric)]
    if metric not in Metrics.names():
        raise ValueError(f"metric {metric!r} is none of {', '.join(Metrics.names())}")
    g = prune_non_float_tensors(g)
    if prune_same_scale:
        g = prune_same_scale_tensors(g)
    nodes = _drawn(g)
    row = {n: i for i, n in enumerate(nodes)}
    directions = [d for d in ("fwd", "bwd") if any(getattr(n.meta["metrics"], d) is not None for n in nodes)]
    if ax is None:
        # Constrained: the figure has room for all labels, however it is saved.
        _, ax = plt.subplots(figsize=(10, 1.5 + len(nodes) / 4), layout="constrained")
    ax.set_xscale("log", base=2)
    ax.set_ylim(len(nodes), -1)

    measured = [(n, d, value) for n in nodes for d in directions if (value := _point(n, d, metric)) is not None]
    spots = {(n, d): value for n, d, value in measured if _visible(value)}
    low = xmin if xmin is not None else min(spots.values(), default=2.0**-16) / 4
    high = xmax if xmax is not None else max(spots.values(), default=2.0**16) * 4
    if show_error_bars:
        _draw_error_bars(ax, row, directions)
    left_out = [each for each in measured if not _visible(each[2])]
    spots |= _draw_at_the_edges(ax, row, left_out, (low, high), show_zero_tensors)
    for (n, d), x in spots.items():
        marker = "v" if n.meta["requires_grad"] else "o"
        ax.plot([x], [row[n] + _SHIFT[d]], color=_COLORS[d], marker=marker, markersize=5, zorder=3)
    if show_arrows:
        _draw_arrows(ax, row, directions, spots)
    _draw_ranges(ax, formats, len(nodes), (low, high))
    ax.set_xlim(low, high)
    ax.set_yticks(range(len(nodes)))
    ax.set_yticklabels([_label(n) for n in nodes])
    ax.xaxis.set_ticks_position("top")
    ax.xaxis.set_label_position("top")
    ax.set_xlabel(Metrics.get_full_name(metric))
    if title:
        ax.set_title(title, fontweight="bold")
    _draw_legend(ax, nodes, directions)
    return ax


def visualiser(
    model: nn.Module,
    tokenizer: Any,
    batch_size: int,
    seq_len: int,
    backward: bool = True,
    dataset_path: Optional[str] = None,
    dataset_name: Optional[str] = None,
    **plot_kwargs: Any,
) -> "Axes":
    """:func:`plot` of one step of a language model on :func:`example_batch`.

    `model` is called as ``output, loss = model(inputs, labels)``.
    """
    inputs, _, labels = example_batch(tokenizer, batch_size, seq_len, dataset_path, dataset_name)
    tracked = track_scales(model.to("cpu"))
    _, loss = tracked(inputs, labels)
    if backward:
        loss.backward()
    return plot(tracked.scales_graph(), **plot_kwargs)


visualizer = visualiser  # the same in torch's spelling; the name above is unit-scaling's
__all__ = ["example_batch", "graph_to_dataframe", "plot", "visualiser", "visualizer"]
