"""The plain oracle of rectangles: which (sequence, position) stands in each cell, by the definition of each layout, and its fields.

Lists and loops, on purpose; imports nothing of fsref. A cell is ``(sequence, position)``, or ``None`` for padding.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Cell = tuple[int, int] | None


def left(lengths: Sequence[int], width: int) -> list[list[Cell]]:
    return [[None] * (width - n) + [(s, p) for p in range(n)] for s, n in enumerate(lengths)]


def right(lengths: Sequence[int], width: int) -> list[list[Cell]]:
    return [[(s, p) for p in range(n)] + [None] * (width - n) for s, n in enumerate(lengths)]


def prompt_completion(lengths: Sequence[int], prompts: Sequence[int], prompt_width: int, completion_width: int) -> list[list[Cell]]:
    out: list[list[Cell]] = []
    for s, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        row: list[Cell] = [None] * (prompt_width - prompt)
        row += [(s, p) for p in range(length)]
        out.append(row + [None] * (prompt_width + completion_width - len(row)))
    return out


def laid(sequences: Sequence[NDArray[Any]], cells: Sequence[Sequence[Cell]], fill: Any) -> NDArray[Any]:
    """[B, W, ...] of one array per sequence."""
    first = sequences[0]
    out = np.full((len(cells), len(cells[0]), *first.shape[1:]), fill, first.dtype)
    for b, row in enumerate(cells):
        for w, cell in enumerate(row):
            if cell is not None:
                out[b, w] = sequences[cell[0]][cell[1]]
    return out


def laid_values(counts: Sequence[NDArray[Any]], values: Sequence[NDArray[Any]], cells: Sequence[Sequence[Cell]]) -> NDArray[Any]:
    """[N]: the values of a ragged field, cell after cell."""
    out = [values[0][:0]]
    for row in cells:
        for cell in row:
            if cell is not None:
                s, p = cell
                start = int(counts[s][:p].sum())
                out.append(values[s][start : start + int(counts[s][p])])
    return np.concatenate(out)
