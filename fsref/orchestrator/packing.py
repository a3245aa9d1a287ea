"""Where each sample of a step goes: data rank and micro batch.

Pure: token counts in, indices out. Owns balance (tokens per data rank), the token budget of a micro batch, and the rule that every data
rank gets equally many micro batches, so that collectives match. Refuses to cut, drop or reorder the tokens of a sample.
"""

from collections.abc import Sequence

from fsref.errors import ConfigError

MicroBatchIndices = list[int]
"""Indices of the samples that go through one forward; empty: a padding dummy stands there."""


def place(token_counts: Sequence[int], routed: Sequence[bool], *, data_ranks: int, tokens_max: int) -> list[list[MicroBatchIndices]]:
    """Lays samples over ``data_ranks`` ranks; ``out[rank][micro_batch]`` are indices into ``token_counts``.

    Every index stands exactly once; a micro batch holds at most ``tokens_max`` tokens and never samples with and without routing;
    the token sums of two ranks differ by at most the largest sample; every rank has equally many micro batches. The same
    input gives the same placement. Raises ``ConfigError`` for a sample that alone exceeds the budget.
    """
    if token_counts and (longest := max(token_counts)) > tokens_max:
        raise ConfigError(
            f"a sample has {longest} tokens, a micro batch holds {tokens_max}: raise orchestrator.tokens_per_micro_batch"
            " to at least orchestrator.sequence_tokens_max"
        )
    ranks = [_pack(mine, token_counts, routed, tokens_max) for mine in _spread(token_counts, data_ranks)]
    count = max((len(batches) for batches in ranks), default=0)
    for batches in ranks:
        _level(batches, count, token_counts)
    return ranks


def _spread(token_counts: Sequence[int], data_ranks: int) -> list[list[int]]:
    """Longest first, each to the rank with the fewest tokens so far (the lowest of equals)."""
    ranks: list[list[int]] = [[] for _ in range(data_ranks)]
    loads = [0] * data_ranks
    for i in _longest_first(range(len(token_counts)), token_counts):
        # Equal loads go to the rank with fewer samples, so that samples without tokens spread too.
        rank = min(range(data_ranks), key=lambda r: (loads[r], len(ranks[r]), r))
        ranks[rank].append(i)
        loads[rank] += token_counts[i]
    return ranks


def _pack(indices: Sequence[int], token_counts: Sequence[int], routed: Sequence[bool], tokens_max: int) -> list[MicroBatchIndices]:
    """First fit, longest first, one kind (with or without routing) per micro batch."""
    out: list[MicroBatchIndices] = []
    for kind in (True, False):
        batches: list[MicroBatchIndices] = []
        room: list[int] = []
        for i in _longest_first([i for i in indices if routed[i] is kind], token_counts):
            slot = next((n for n, free in enumerate(room) if free >= token_counts[i]), None)
            if slot is None:
                batches.append([i])
                room.append(tokens_max - token_counts[i])
            else:
                batches[slot].append(i)
                room[slot] -= token_counts[i]
        out += batches
    return out


def _level(batches: list[MicroBatchIndices], count: int, token_counts: Sequence[int]) -> None:
    """Brings a rank to ``count`` micro batches: first by splitting its fullest ones, which costs nothing, then with dummies."""
    while len(batches) < count:
        splittable = [n for n, b in enumerate(batches) if len(b) > 1]
        if not splittable:
            batches += [[] for _ in range(count - len(batches))]
            return
        fullest = max(splittable, key=lambda n: (sum(token_counts[i] for i in batches[n]), -n))
        halves = _spread([token_counts[i] for i in batches[fullest]], 2)
        whole = batches[fullest]
        batches[fullest : fullest + 1] = [[whole[i] for i in half] for half in halves]


def _longest_first(indices: Sequence[int], token_counts: Sequence[int]) -> list[int]:
    return sorted(indices, key=lambda i: (-token_counts[i], i))
