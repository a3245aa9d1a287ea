"""Padded layouts of packed rows, as index arrays: padding is chosen where rows are read, and never stored.

Every function gives ``index`` (int64, which packed row stands in each place, -1 for padding) and a reader of any array library takes
``rows[index]`` and masks by ``index >= 0``.

Shape letters: T packed tokens, S sequences, W width of a rectangle.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fsref.errors import PayloadError

Side = Literal["left", "right"]


def padded(token_count: int, *, multiple: int) -> NDArray[np.int64]:
    """Index [T'] of ``token_count`` rows, padded behind to a multiple."""
    if multiple < 1:
        raise PayloadError(f"rows cannot be padded to a multiple of {multiple}")
    index = np.full(-(-token_count // multiple) * multiple, -1, np.int64)
    index[:token_count] = np.arange(token_count)
    return index


def rectangle(lengths: Sequence[int], *, width: int, pad: Side) -> NDArray[np.int64]:
    """Index [S, W] of sequences packed one after the other, padding on the left or the right. Raises ``PayloadError`` for a longer one."""
    index = np.full((len(lengths), width), -1, np.int64)
    start = 0
    for n, length in enumerate(lengths):
        if not 0 <= length <= width:
            raise PayloadError(f"sequence {n} has {length} tokens, which do not fit a width of {width}")
        at = width - length if pad == "left" else 0
        index[n, at : at + length] = np.arange(start, start + length)
        start += length
    return index


def prompt_and_completion(
    prompt_lengths: Sequence[int], completion_lengths: Sequence[int], *, prompt_width: int, completion_width: int
) -> NDArray[np.int64]:
    """Index [S, prompt_width + completion_width]: prompts end and completions begin at the same column, as rollout engines lay them."""
    if len(prompt_lengths) != len(completion_lengths):
        raise PayloadError(f"{len(prompt_lengths)} prompts and {len(completion_lengths)} completions")
    index = np.full((len(prompt_lengths), prompt_width + completion_width), -1, np.int64)
    start = 0
    for n, (prompt, completion) in enumerate(zip(prompt_lengths, completion_lengths, strict=True)):
        if not (0 <= prompt <= prompt_width and 0 <= completion <= completion_width):
            raise PayloadError(f"sequence {n}: {prompt} + {completion} tokens do not fit {prompt_width} + {completion_width}")
        index[n, prompt_width - prompt : prompt_width + completion] = np.arange(start, start + prompt + completion)
        start += prompt + completion
    return index


def take(rows: NDArray[Any], index: NDArray[np.int64], *, fill: Any = 0) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """``rows`` [T, ...] laid out by ``index``, ``fill`` in the padding, and where a row is not padding."""
    real = index >= 0
    out = np.full((*index.shape, *rows.shape[1:]), fill, rows.dtype)
    out[real] = rows[index[real]]
    return out, real
