"""The plain oracle of parallel layouts: which (sequence, position) stands at each row of a rank, by the definition of each layout.

Lists and loops, on purpose; imports nothing of fsref. A row is ``(sequence, position)``; a position behind the sequence's tokens is its
padding, ``None`` is padding behind all sequences.
"""

from collections.abc import Sequence

Row = tuple[int, int] | None
LAYOUTS = ("zigzag", "contiguous", "allgather")


def room_of(length: int, layout: str, ranks: int, extra: int) -> int:
    """Rows that a sequence is padded to before the split: the least that divides, and ``extra`` such steps."""
    step = {"zigzag": 2 * ranks, "contiguous": ranks, "allgather": 1}[layout]
    return (-(-length // step) + extra) * step


def rank_rows(rooms: Sequence[tuple[int, int]], layout: str, *, ranks: int, multiple: int) -> list[list[Row]]:
    """Rows of every context rank; ``rooms``: (sequence, padded length) in packing order."""
    whole: list[list[Row]] = [[(n, p) for p in range(room)] for n, room in rooms]
    out: list[list[Row]] = [[] for _ in range(ranks)]
    if layout == "allgather":
        flat = [row for sequence in whole for row in sequence]
        while len(flat) % (ranks * multiple):
            flat.append(None)
        size = len(flat) // ranks
        return [flat[r * size : (r + 1) * size] for r in range(ranks)]
    for sequence in whole:
        parts = 2 * ranks if layout == "zigzag" else ranks
        size = len(sequence) // parts
        assert size * parts == len(sequence)
        chunks = [sequence[n * size : (n + 1) * size] for n in range(parts)]
        for r in range(ranks):
            out[r] += chunks[r] + chunks[parts - 1 - r] if layout == "zigzag" else chunks[r]
    for rows in out:
        while len(rows) % multiple:
            rows.append(None)
    return out
