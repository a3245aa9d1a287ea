"""What an audit concludes: the verdict, its figures, and the form for people (ledger.md section 7).

Owns counting and rendering. Refuses to say ok when something could not be read: that is UNPROVABLE.
"""

import enum
from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, Final

from fsref.ledger.ids import pack
from fsref.ledger.merge import RunFold
from fsref.ledger.predicates import Evidence, Violation, violations

LISTED_MAX: Final = 100
"""Violations and ids that a report lists; the counts are exact."""
_reason: Final = attrgetter("reason")
_attempt: Final = itemgetter(2)
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Verdict(enum.StrEnum):
    """The four outcomes of an audit."""

    PROVED = "PROVED"
    """Closed, all predicates hold, all journals complete, store empty."""
    BALANCED = "BALANCED"
    """An open run without a violation."""
    UNPROVABLE = "UNPROVABLE"
    """Something could not be read; the report says what."""
    VIOLATED = "VIOLATED"
    """A rule was broken; the report has the evidence."""


EXIT_CODES: Final = {Verdict.PROVED: 0, Verdict.BALANCED: 10, Verdict.UNPROVABLE: 20, Verdict.VIOLATED: 1}


@dataclass(frozen=True)
class Totals:
    """Exact figures of a run."""

    kept: int = 0
    kept_bytes: int = 0
    producers: int = 0
    producers_closed: int = 0
    producers_adopted: dict[str, int] = field(default_factory=dict)
    """By how: closed, dead, flock, forced."""
    producers_open: int = 0
    dropped: int = 0
    dropped_bytes: int = 0
    dropped_by: dict[str, int] = field(default_factory=dict)
    done: int = 0
    done_retry: int = 0
    live: int = 0
    live_bytes: int = 0
    pending: int = 0
    void: int = 0
    extra: int = 0
    """Objects that an adopter found without a keep."""
    unreceipted: int = 0
    """Dropped objects whose keep was lost with a node; others' journals prove what became of them."""
    suppressed: int = 0
    records: int = 0
    present: int | None = None
    """Objects under ``obj/``; None if it was not listed."""
    staging: int | None = None


@dataclass(frozen=True)
class Audit:
    """The result of ``fsref audit``."""

    run: str
    verdict: Verdict
    closed: bool
    totals: Totals
    violations: tuple[Violation, ...] = ()
    violation_counts: dict[str, int] = field(default_factory=dict)
    """By kind: double, lost, unexpected, and the predicates' names for the rest."""
    problems: tuple[str, ...] = ()
    """Why it is unprovable."""
    open_incarnations: tuple[str, ...] = ()
    pending_ids: tuple[str, ...] = ()
    """The first of the dropped ids that are not removed yet."""

    @property
    def exit_code(self) -> int:
        """0 PROVED, 10 BALANCED, 20 UNPROVABLE, 1 VIOLATED."""
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            "run": self.run,
            "state": "closed" if self.closed else "open",
            "verdict": str(self.verdict),
            "exit_code": self.exit_code,
            **vars(self.totals),
            "violation_counts": self.violation_counts,
            "violations": [
                {
                    "predicate": v.predicate,
                    "subject": v.subject,
                    "detail": v.detail,
                    "evidence": [{"journal": journal, "offset": offset} for journal, offset in v.places],
                }
                for v in self.violations
            ],
            "problems": list(self.problems),
            "open_incarnations": list(self.open_incarnations),
            "pending_ids": list(self.pending_ids),
        }

    def render(self) -> list[str]:
        """Lines for people."""
        t = self.totals
        state = "CLOSED" if self.closed else "OPEN"
        where = "not listed" if t.present is None else f"{t.present:,} objects, {t.staging:,} staging files under obj/"
        lines = [
            f"run {self.run}  {state}  {self.verdict}",
            f"kept      {t.kept:,} objects  {size_text(t.kept_bytes)}   from {_producers_text(t)}",
            *([f"          {', '.join(found)}"] if (found := _found_text(t)) else []),
            f"dropped   {t.dropped:,}{_reasons_text(t)}",
            f"done      {t.done:,} (first try {t.done - t.done_retry:,}, after retry {t.done_retry:,})   {self._rest_text()}",
            f"store     {where}",
        ]
        if self.pending_ids:
            more = t.pending - len(self.pending_ids)
            named = ", ".join(f"{inc}/{seqs}" for inc, seqs in pack(self.pending_ids).items())
            lines.append(f"pending   {named}{f' and {more:,} more' if more else ''}")
        lines += [f"cannot be proved: {p}" for p in self.problems[:LISTED_MAX]]
        for v in self.violations:
            places = ", ".join(f"{journal}.jnl:{offset}" for journal, offset in v.places)
            lines.append(f"violated {v.predicate}: {v.subject}: {v.detail}{f'  [{places}]' if places else ''}")
        if (total := sum(self.violation_counts.values())) > len(self.violations):
            lines.append(f"... and {total - len(self.violations):,} more violations")
        return lines

    def _rest_text(self) -> str:
        t, counts = self.totals, self.violation_counts
        named = {
            "live": t.live,
            "pending": t.pending,
            "double": counts.get("double", 0),
            "lost": counts.get("lost", 0),
            "unexpected": counts.get("unexpected", 0),
            "void": t.void,
            "suppressed double calls": t.suppressed,
        }
        return "   ".join(f"{name} {count:,}" for name, count in named.items())


def conclude(run_id: str, evidence: Evidence) -> Audit:
    """Judges a merged run."""
    run, store = evidence.run, evidence.store
    problems = list(run.problems)
    found = violations(evidence)
    totals = count(evidence)
    open_incarnations = tuple(inc for inc in run.journals if not run.ended(inc))
    settled = totals.live == 0 and totals.pending == 0
    empty = store is not None and not (store.present or store.staging or store.foreign)
    closed = bool(run.journals) and not open_incarnations and (settled or evidence.final)
    if found:
        verdict = Verdict.VIOLATED
    elif problems:
        verdict = Verdict.UNPROVABLE
    else:
        verdict = Verdict.PROVED if closed and empty else Verdict.BALANCED
    return Audit(
        run=run_id,
        verdict=verdict,
        closed=closed,
        totals=totals,
        violations=tuple(found[:LISTED_MAX]),
        violation_counts=dict(Counter(map(_kind, found))),
        problems=tuple(problems),
        open_incarnations=open_incarnations,
        pending_ids=tuple(f"{inc}/{seq}" for (inc, seq), _ in zip(run.pending(), range(LISTED_MAX), strict=False)),
    )


def count(evidence: Evidence) -> Totals:
    """The figures of a run."""
    run, store = evidence.run, evidence.store
    reasons: Counter[str] = Counter()
    for drops in run.drops.values():
        reasons.update(map(_reason, drops.values()))
    kept_bytes = sum(run.journals[inc].kept_bytes for inc in run.producers)
    how = Counter(adoption.how for inc in run.producers if (found := run.adoption_of(inc)) for adoption in [found[1]])
    closed_only = sum(run.journals[inc].sealed and not run.adopted(inc) for inc in run.producers)
    live = [size for _, _, size in run.live()]
    attempts: Counter[int] = Counter()
    for seqs in run.done.values():
        attempts.update(map(_attempt, seqs.values()))
    return Totals(
        kept=sum(len(run.journals[inc].kept) for inc in run.producers),
        kept_bytes=kept_bytes,
        producers=len(run.producers),
        producers_closed=closed_only + how.pop("closed", 0),
        producers_adopted=dict(sorted(how.items())),
        producers_open=sum(not run.ended(inc) for inc in run.producers),
        dropped=reasons.total(),
        dropped_bytes=kept_bytes - sum(live),
        dropped_by=dict(reasons.most_common()),
        done=attempts.total(),
        done_retry=attempts.total() - attempts[1],
        live=len(live),
        live_bytes=sum(live),
        pending=sum(1 for _ in run.pending()),
        void=_void_count(run),
        extra=sum(map(len, run.extra.values())),
        unreceipted=_unreceipted(run),
        suppressed=sum(f.close.counters.get("suppressed", 0) for f in run.journals.values() if f.close),
        records=sum(f.count for f in run.journals.values()),
        present=None if store is None else sum(map(len, store.present.values())),
        staging=None if store is None else len(store.staging),
    )


def _unreceipted(run: RunFold) -> int:
    total = 0
    for inc, drops in run.drops.items():
        kept = run.journals[inc].kept if inc in run.journals else {}
        extra = run.extra.get(inc, ())
        total += len(drops.keys() - kept.keys() - set(extra))
    return total


def size_text(byte_count: float) -> str:
    """Bytes for people, in powers of 1,024."""
    for unit in _UNITS:
        if byte_count < 1024 or unit == _UNITS[-1]:
            return f"{byte_count:,.0f} {unit}" if unit == "B" else f"{byte_count:,.2f} {unit}"
        byte_count /= 1024
    raise AssertionError


def _void_count(run: RunFold) -> int:
    total = 0
    for inc in run.producers:
        fold, found = run.journals[inc], run.adoption_of(inc)
        if found is not None:
            total += len(found[1].void)
        elif fold.close is not None and fold.close.n is not None:
            total += max(0, fold.close.n - len(fold.kept) - len(run.extra.get(inc, ())))
    return total


def _kind(violation: Violation) -> str:
    if violation.predicate == "I2":
        return "double"
    word = violation.detail.partition(":")[0]
    return word if violation.predicate == "I10" and word in ("lost", "unexpected") else violation.predicate


def _producers_text(t: Totals) -> str:
    adopted = sum(t.producers_adopted.values())
    text = f"{t.producers:,} incarnations ({t.producers_closed:,} closed"
    if adopted:
        text += f", {adopted:,} adopted: " + ", ".join(f"{n:,} {how}" for how, n in t.producers_adopted.items())
    return text + (f", {t.producers_open:,} open)" if t.producers_open else ")")


def _found_text(t: Totals) -> list[str]:
    out = [f"{t.extra:,} more were found without a keep"] if t.extra else []
    return out + ([f"{t.unreceipted:,} more are known from others' journals only (node lost)"] if t.unreceipted else [])


def _reasons_text(t: Totals) -> str:
    return " = " + " + ".join(f"{reason} {n:,}" for reason, n in t.dropped_by.items()) if t.dropped_by else ""
