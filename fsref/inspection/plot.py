"""Pictures of a report as PNG files. The only module that touches matplotlib, which no extra but ``plot`` brings."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsref.errors import ConfigError, MissingExtra
from fsref.inspection.load import LayerLoad


def _figure(width: float, height: float) -> Any:
    """A figure that is drawn without a display."""
    try:
        figure = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as e:
        raise MissingExtra.of("plot", "matplotlib") from e
    return figure.Figure(figsize=(width, height), layout="constrained", dpi=120)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, format="png")
    except OSError as e:
        raise ConfigError(f"the picture cannot be written to {path}: {e.strerror}") from e


def plot_load(layers: Sequence[LayerLoad], path: Path, *, title: str) -> None:
    """Expert load as a heat map: layers down, experts across, 1.0 an even share. Raises ``ConfigError`` if there is nothing to draw."""
    if not layers:
        raise ConfigError(f"{title}: no object with expert ids is there any more, so there is no expert load to draw")
    shares = [[c * len(layer.counts) / (sum(layer.counts) or 1) for c in layer.counts] for layer in layers]
    figure = _figure(9, 2 + 0.25 * len(layers))
    axes = figure.add_subplot()
    image = axes.imshow(shares, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_yticks(range(len(layers)), [str(layer.layer) for layer in layers])
    axes.set_title(title)
    figure.colorbar(image, label="share relative to an even one")
    _save(figure, path)


def plot_metrics(steps: Mapping[int, Mapping[str, float]], path: Path, *, title: str, names: Sequence[str]) -> None:
    """Metrics over steps, one panel each. Raises ``ConfigError`` if there is nothing to draw."""
    shown = [n for n in names if any(n in row for row in steps.values())]
    if not shown:
        raise ConfigError(f"{title}: metrics.jsonl has none of {', '.join(names)} yet")
    figure = _figure(9, 2.2 * len(shown))
    for axes, name in zip(figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0], shown, strict=True):
        at = sorted(s for s in steps if name in steps[s])
        axes.plot(at, [steps[s][name] for s in at], marker=".")
        axes.set_ylabel(name)
        axes.grid(visible=True, alpha=0.3)
    axes.set_xlabel("step")
    figure.suptitle(title)
    _save(figure, path)
