"""What an adopter does with the rest of a dead or closed incarnation: pure plans over the fold and a complete listing.

Owns the decisions of ledger.md section 7 (adopt, recover). Refuses clocks and partial listings: the caller hands in a whole one.
"""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from fsref.ledger.fold import JournalFold
from fsref.ledger.ids import IDS_RECORD_MAX, SeqSet, pack_seqs
from fsref.ledger.merge import RunFold, StepKey
from fsref.ledger.predicates import StoreView
from fsref.ledger.records import Adopt

SEQ_AHEAD_MAX: Final = IDS_RECORD_MAX
"""A listed number this far beyond every kept one was not minted by a worker that crashed: it is foreign."""
_TEXT_MAX: Final = 15_000
Numbers = Container[int] | SeqSet


@dataclass(frozen=True)
class Settlement:
    """What is left of one producer."""

    n: int | None
    """Final count of sequence numbers; None where the end of its journal is lost, so that nobody knows."""
    extra: tuple[int, ...] = ()
    """Present without a keep."""
    void: tuple[int, ...] = ()
    """Never held an object."""
    lost: tuple[int, ...] = ()
    """Kept, absent, never dropped: named, never fixed in silence."""
    orphans: tuple[int, ...] = ()
    """Kept, present and nobody's: to drop."""
    unjournaled: tuple[int, ...] = ()
    """Extra and nobody's: to drop."""
    unexpected: tuple[int, ...] = ()
    """Present, and no crash of the producer explains it: left alone."""


def settle(
    fold: JournalFold,
    listed: Iterable[int],
    *,
    dropped: Numbers,
    spoken_for: Numbers,
    staged: Iterable[int] = (),
    sealed_extra: Container[int] | None = None,
    partial: bool = False,
) -> Settlement:
    """Decides about every number of a producer that has ended.

    ``listed`` are the numbers that a complete listing showed, ``dropped`` those that someone dropped, ``spoken_for`` those whose right
    somebody else holds (taken, or parked in a step). ``staged``: numbers whose write was cut off. ``sealed_extra``: what an earlier
    adoption found without a keep; nothing else can have come since. ``partial``: the end of its journal is lost, or all of it. Then
    whatever is listed may be its own, numbers that are not listed say nothing, and a keep without its object is no loss: the drop was
    written behind it.
    """
    if partial:
        return _settle_partial(fold, listed, dropped=dropped, spoken_for=spoken_for, sealed_extra=sealed_extra)
    ceiling = max(fold.kept, default=-1) + 1 + SEQ_AHEAD_MAX
    unexpected = {s for s in listed if s >= ceiling or (sealed_extra is not None and s not in fold.kept and s not in sealed_extra)}
    present = set(listed) - unexpected
    extra = sorted(s for s in present if s not in fold.kept)
    n = max(max(fold.kept, default=-1), max(extra, default=-1), max((s for s in staged if s < ceiling), default=-1)) + 1
    if fold.close is not None and fold.close.n is not None:
        n = max(n, fold.close.n)
    free = [s for s in fold.kept if s not in dropped and s not in spoken_for]
    return Settlement(
        n=n,
        extra=tuple(extra),
        void=tuple(s for s in range(n) if s not in fold.kept and s not in present),
        lost=tuple(sorted(s for s in free if s not in present)),
        orphans=tuple(sorted(s for s in free if s in present)),
        unjournaled=tuple(s for s in extra if s not in dropped and s not in spoken_for),
        unexpected=tuple(sorted(unexpected)),
    )


def _settle_partial(
    fold: JournalFold, listed: Iterable[int], *, dropped: Numbers, spoken_for: Numbers, sealed_extra: Container[int] | None
) -> Settlement:
    present = sorted(listed)
    late = [] if sealed_extra is None else [s for s in present if s not in fold.kept and s not in sealed_extra]
    mine = [s for s in present if s not in late] if late else present
    free = [s for s in mine if s not in dropped and s not in spoken_for]
    return Settlement(
        n=None,
        extra=tuple(s for s in mine if s not in fold.kept),
        orphans=tuple(s for s in free if s in fold.kept),
        unjournaled=tuple(s for s in free if s not in fold.kept),
        unexpected=tuple(late),
    )


def adopt_records(h: str, *, how: str, end: int, settlement: Settlement | None, ms: int) -> list[Adopt]:
    """The ``adopt`` record, split where its sets do not fit a line. ``settlement`` is None for a consumer, trainer or recovery."""
    if settlement is None:
        return [Adopt(ms, h, how, end)]
    texts = {name: _split_text(getattr(settlement, name)) for name in ("extra", "void", "lost")}
    count = max(1, *map(len, texts.values()))
    return [
        Adopt(
            ms,
            h,
            how,
            end,
            settlement.n,
            part=(k + 1, count) if count > 1 else None,
            **{name: pieces[k] for name, pieces in texts.items() if k < len(pieces)},
        )
        for k in range(count)
    ]


def _split_text(seqs: tuple[int, ...]) -> list[str]:
    """Packed ranges in pieces that fit three to a line."""
    out: list[str] = []
    for start in range(0, len(seqs), IDS_RECORD_MAX):
        piece = seqs[start : start + IDS_RECORD_MAX]
        text = pack_seqs(piece)
        step = len(piece) if len(text) <= _TEXT_MAX else _TEXT_MAX // 11
        out += [pack_seqs(piece[at : at + step]) for at in range(0, len(piece), step)]
    return out


@dataclass(frozen=True)
class RecoveryPlan:
    """Everything that a recovery writes and removes."""

    settlements: dict[str, Settlement] = field(default_factory=dict)
    """Producers that are adopted now."""
    redo: tuple[str, ...] = ()
    """Dropped by someone, not known to be gone."""
    recovered: tuple[str, ...] = ()
    unjournaled: tuple[str, ...] = ()
    parked: tuple[str, ...] = ()
    """Left for a trainer that replays their step."""
    unexpected: tuple[str, ...] = ()
    """Present, and nothing explains them."""


def plan_recovery(
    run: RunFold,
    view: StoreView,
    *,
    resume_step: int | None,
    replay: bool,
    published: Container[StepKey],
    sealed: Container[str],
    lost: Collection[str] = (),
    partial: Container[str] = (),
) -> RecoveryPlan:
    """Decides about every id of a stopped run.

    ``resume_step`` c: steps up to c are behind the trainer's checkpoint; None is infinity, nothing is left. With ``replay``, steps
    beyond c whose step file is ``published`` stay parked. Producers in ``sealed`` were settled by an earlier adoption; those in ``lost``
    have no journal at all any more, of those in ``partial`` its end is lost: the listing settles them.
    """
    parked = _parked(run, resume_step, published) if replay and resume_step is not None else {}
    settlements: dict[str, Settlement] = {}
    recovered: list[str] = []
    unjournaled: list[str] = []
    unexpected: list[str] = []
    for inc in (*run.producers, *lost):
        found = settle(
            run.journals.get(inc) or JournalFold(inc),
            view.present.get(inc, ()),
            dropped=run.drops.get(inc, {}),
            spoken_for=parked.get(inc, set()),
            staged=view.staged(inc),
            sealed_extra=run.extra.get(inc, set()) if inc in sealed else None,
            partial=inc in lost or inc in partial,
        )
        if inc not in sealed:
            settlements[inc] = found
        recovered += [f"{inc}/{s}" for s in found.orphans]
        unjournaled += [f"{inc}/{s}" for s in found.unjournaled]
        unexpected += [f"{inc}/{s}" for s in found.unexpected]
    redo = tuple(f"{inc}/{seq}" for inc, seq in run.pending())
    return RecoveryPlan(
        settlements=settlements,
        redo=redo,
        recovered=tuple(recovered),
        unjournaled=tuple(unjournaled),
        parked=tuple(f"{inc}/{s}" for inc, seqs in parked.items() for s in sorted(seqs)),
        unexpected=tuple(unexpected),
    )


def _parked(run: RunFold, resume_step: int | None, published: Container[StepKey]) -> Mapping[str, set[int]]:
    out: dict[str, set[int]] = {}
    for key, found in run.ships.items():
        if resume_step is not None and key[0] > resume_step and key in published:
            for inc, seqs in found[0][1].ids.items():
                dropped = run.drops.get(inc, {})
                left = {s for s in seqs if s not in dropped}
                if left:
                    out.setdefault(inc, set()).update(left)
    return out


@dataclass(frozen=True)
class SuccessionPlan:
    """What the orchestrators before one left to it while workers and trainer live on."""

    replicas: frozenset[str] = frozenset()
    """Producers that they had adopted."""
    redo: tuple[str, ...] = ()
    """Dropped by them, not known to be gone."""
    recovered: tuple[str, ...] = ()
    """Taken, and neither dropped nor shipped in a batch that a trainer can ask for."""
    orphans: tuple[str, ...] = ()
    """Of replicas whose adopter died before it had dropped them all."""
    unjournaled: tuple[str, ...] = ()


def plan_succession(run: RunFold, left: Iterable[str], *, visible: Callable[[StepKey], bool]) -> SuccessionPlan:
    """Decides about everything that the ended orchestrators ``left`` held, theirs or adopted.

    ``visible`` says whether the step file of a shipped batch can be read; one that cannot never will be: its orchestrator has ended.
    """
    mine = set(left)
    mine.update(*(run.closures.get(inc, ()) for inc in left))
    replicas = frozenset(inc for inc in mine if inc.startswith("env."))
    return SuccessionPlan(
        replicas=replicas,
        redo=tuple(f"{inc}/{seq}" for inc, seq in run.pending() if run.drops[inc][seq].journal in mine),
        recovered=tuple(_unshipped(run, mine, visible)),
        orphans=tuple(_nobodys(run, replicas, kept=True)),
        unjournaled=tuple(_nobodys(run, replicas, kept=False)),
    )


def _unshipped(run: RunFold, mine: Collection[str], visible: Callable[[StepKey], bool]) -> Iterator[str]:
    gone: dict[StepKey, bool] = {}
    for inc, seqs in _taken(run, [h for h in mine if h.startswith("orc.")]):
        drops, batches = run.drops.get(inc, {}), run.batch_of.get(inc, {})
        for seq in seqs:
            if seq in drops:
                continue
            key = batches.get(seq)
            if key is not None and key not in gone:
                gone[key] = key not in run.step_takers and not visible(key)
            if key is None or gone[key]:
                yield f"{inc}/{seq}"


def _nobodys(run: RunFold, replicas: Collection[str], *, kept: bool) -> Iterator[str]:
    """Of dead replicas whose adopter died before it had dropped them all: what has a keep, or what was found without one."""
    taken: dict[str, set[int]] = {}
    for inc, seqs in _taken(run, [j for j in run.journals if j.startswith(("orc.", "evl."))]):
        taken.setdefault(inc, set()).update(seqs)
    for inc in sorted(replicas):
        fold, drops = run.journals[inc], run.drops.get(inc, {})
        spoken_for, lost = taken.get(inc, set()), run.lost.get(inc, set())
        for seq in sorted(fold.kept if kept else run.extra.get(inc, set()).difference(fold.kept)):
            if seq not in drops and seq not in spoken_for and seq not in lost:
                yield f"{inc}/{seq}"


def _taken(run: RunFold, consumers: Collection[str]) -> Iterator[tuple[str, list[int]]]:
    for consumer in sorted(consumers):
        for inc, seqs in run.journals[consumer].taken.items():
            yield inc, sorted(seqs)
