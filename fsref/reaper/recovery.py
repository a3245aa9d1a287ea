"""``fsref recover`` and ``fsref close``: settling a stopped run, offline (ledger.md section 7, recover).

Owns the order: everyone dead, one recoverer, fold and complete listing, plan, fences, records, W1, deletions, ``done``, close. A crash
anywhere is repaired by running it again: the dead ``rec`` incarnation is adopted like any other.
"""

import contextlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fsref.config import LedgerSection
from fsref.errors import BadRef, JournalCorrupt, JournalPoisoned, RunBusy, StoreError, StoreUnavailable
from fsref.failpoints import failpoint
from fsref.journal.death import How, how_ended
from fsref.journal.file import SEAL_RETRY_S, Journal, make_folder, now_ms
from fsref.journal.identity import mint
from fsref.journal.markers import acquire_lock, release_lock
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader, OpenJournal
from fsref.journal.run import RunInfo
from fsref.journal.secure import sync_ended, sync_journal
from fsref.ledger import records
from fsref.ledger.merge import RunFold
from fsref.ledger.predicates import StoreView
from fsref.ledger.recovery import RecoveryPlan, adopt_records, plan_recovery
from fsref.ledger.report import Audit, Verdict
from fsref.reaper.adopt import fence
from fsref.reaper.auditing import audit
from fsref.reaper.delete import delete_objects
from fsref.reaper.deleter import check_fence, write_done, write_drop
from fsref.reaper.listing import list_objects
from fsref.reaper.succession import is_published
from fsref.refs import object_name
from fsref.store.base import Deletion, Store, check_name
from fsref.store.capabilities import probe

DELETE_DEADLINE_S = 120.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovery:
    """What a recovery did."""

    inc: str
    adopted: dict[str, How]
    """Incarnation to how its end was proved."""
    recovered: int
    unjournaled: int
    redone: int
    parked: int
    """Objects that stay for a trainer that replays their step."""
    lost: int
    staging: int
    unexpected: tuple[str, ...]
    """Foreign names under obj/; removed only where that was asked for."""
    pending: tuple[str, ...]
    """Ids, and names of staging and unexpected files, whose removal failed: run it again."""


@dataclass(frozen=True)
class _Scene:
    """A stopped run as the recoverer sees it."""

    run: RunFold
    view: StoreView
    ends: Mapping[str, int]
    hows: Mapping[str, How]
    journals: Mapping[str, OpenJournal]
    partial: frozenset[str]
    """Producers of which the end of the journal is on a node that is not this one."""
    lost: tuple[str, ...]
    """Producers that have ended, and of which there is no journal."""


def recover(
    store: Store,
    ledger_dir: Path,
    *,
    run: RunInfo,
    resume_step: int | None,
    replay: Literal["drop", "keep"] = "drop",
    force_dead: Collection[str] = (),
    accept_corrupt: bool = False,
    remove_unexpected: bool = False,
    section: LedgerSection | None = None,
    deadline_s: float = DELETE_DEADLINE_S,
) -> Recovery:
    """Settles everything that dead or closed incarnations left, with the whole run stopped.

    ``resume_step`` is the last step that the trainer's checkpoint covers (-1: none); None is the end of the run: nothing is left.
    ``replay="keep"`` parks later steps whose step file is there (trainer-only restarts); ``"drop"`` removes them. ``force_dead`` names
    incarnations that an operator declares dead. Raises ``RunBusy`` naming the live ones, ``JournalCorrupt`` unless ``accept_corrupt``,
    ``RunMismatch``, ``StoreError`` if the listing is not complete.
    """
    make_folder(ledger_dir)
    ledger = Ledger.of(store, ledger_dir)
    why = _why(force_dead=force_dead, accept_corrupt=accept_corrupt, remove_unexpected=remove_unexpected)
    retry_s = section.seal_retry_s if section is not None else SEAL_RETRY_S
    with Journal(ledger, mint("rec", "main"), run_uuid=run.run_uuid, why=why, retry_s=retry_s) as journal:
        inc = journal.inc
        try:
            failpoint("recover.after_open")
            _check_creates_once(ledger)
            _lock(ledger, inc, run, force_dead=force_dead)
            failpoint("recover.after_lock")
            scene = _look(store, ledger, inc, run, force_dead=force_dead, accept_corrupt=accept_corrupt)
        except BaseException:
            _withdraw(journal, ledger)
            raise
        failpoint("recover.after_look")
        published = {key for key in scene.run.ships if replay == "keep" and is_published(store, key)}
        plan = plan_recovery(
            scene.run,
            scene.view,
            resume_step=resume_step,
            replay=replay == "keep",
            published=published,
            sealed=[p for p in (*scene.run.producers, *scene.lost) if scene.run.adopted(p)],
            lost=scene.lost,
            partial=scene.partial,
        )
        check_fence(ledger, inc)
        _record(journal, ledger, scene, plan)
        pending = _remove(store, ledger, journal, plan, section=section or LedgerSection(), deadline_s=deadline_s)
        unexpected = (*scene.view.foreign, *map(object_name, plan.unexpected))
        check_fence(ledger, inc)
        others = store.delete([*scene.view.staging, *(filter(_legal, unexpected) if remove_unexpected else ())])
        pending += tuple(name for name, outcome in others.items() if not isinstance(outcome, Deletion))
        final = resume_step is None and not pending
        failpoint("recover.before_close")
        journal.append(_closing(scene, plan, final=final, remove_unexpected=remove_unexpected, force_dead=force_dead))
        journal.sync()
        failpoint("recover.after_close")
        release_lock(ledger, inc)
    return Recovery(
        inc=inc,
        adopted={h: scene.hows[h] for h in _to_adopt(scene)},
        recovered=len(plan.recovered),
        unjournaled=len(plan.unjournaled),
        redone=len(plan.redo),
        parked=len(plan.parked),
        lost=sum(len(s.lost) for s in plan.settlements.values()),
        staging=len(scene.view.staging),
        unexpected=unexpected,
        pending=pending,
    )


def close_run(
    store: Store, ledger_dir: Path, *, run: RunInfo, force_dead: Collection[str] = (), section: LedgerSection | None = None
) -> Audit:
    """The end of a run: ``recover`` to infinity unless the run is PROVED as it stands, then the audit. Raises as ``recover``."""
    found = audit(store, ledger_dir, run=run.run, run_uuid=run.run_uuid)
    if found.verdict is Verdict.PROVED:
        _seal_ends(Ledger.of(store, ledger_dir), run)
        return found
    recover(store, ledger_dir, run=run, resume_step=None, force_dead=force_dead, section=section)
    return audit(store, ledger_dir, run=run.run, run_uuid=run.run_uuid)


def _why(*, force_dead: Collection[str], accept_corrupt: bool, remove_unexpected: bool) -> str:
    """The options that overrule a check, for the record; ``adopt`` records name every incarnation that was forced."""
    asked = ["accept-corrupt"] * accept_corrupt + ["remove-unexpected"] * remove_unexpected
    asked += [f"force-dead {len(force_dead)}: {' '.join(force_dead)}"] if force_dead else []
    return ascii(", ".join(asked))[1:-1][:256]


def _seal_ends(ledger: Ledger, run: RunInfo) -> None:
    """Whoever died between its close and the seal of it: what proves the run here shall prove it everywhere."""
    if ledger.store is None:
        return
    reader = LedgerReader(ledger, run_uuid=run.run_uuid, compare=False)
    reader.refresh()
    for journal in reader.journals.values():
        if journal.in_folder and journal.fold.sealed and sum(journal.row) < journal.end:
            sync_journal(ledger, journal)


def _lock(ledger: Ledger, inc: str, run: RunInfo, *, force_dead: Collection[str]) -> None:
    owner = acquire_lock(ledger, inc)
    while owner is not None:
        journal = LedgerReader(ledger, run_uuid=run.run_uuid).read_one(owner)
        if journal is not None and how_ended(ledger, journal, forced=force_dead) is None:
            raise RunBusy(f"the recovery {owner} may be alive: wait for it, stop its process, or --force-dead one that is gone")
        release_lock(ledger, owner)
        owner = acquire_lock(ledger, inc)


def _look(store: Store, ledger: Ledger, inc: str, run: RunInfo, *, force_dead: Collection[str], accept_corrupt: bool) -> _Scene:
    """Everyone's end proved, all journals read, a complete listing."""
    reader = LedgerReader(ledger, run_uuid=run.run_uuid)
    reader.refresh()
    if not reader.listed:  # a journal that was not seen may be of a live process
        raise StoreUnavailable(f"the run cannot be recovered: {'; '.join(reader.problems)}")
    hows = {i: how_ended(ledger, j, forced=force_dead) for i, j in reader.journals.items() if i != inc}
    sync_ended(ledger, (j for i, j in reader.journals.items() if hows.get(i) is not None))
    ends = reader.refresh()  # again: one that was alive at the first look may have written before it ended
    damaged = [j.problem for j in reader.journals.values() if j.problem] + reader.problems
    merged = reader.merge(accept_corrupt=accept_corrupt)
    alive = [i for i in reader.journals if i != inc and hows.get(i) is None and not merged.adopted(i)]
    if alive:
        raise RunBusy(f"{len(alive)} incarnations may be alive: {', '.join(alive)}: stop the run first (or --force-dead one that is gone)")
    if damaged and not accept_corrupt:
        raise JournalCorrupt(f"the run cannot be recovered as it is (--accept-corrupt trusts the readable part): {'; '.join(damaged)}")
    view = list_objects(store)
    lost = _lost_producers(merged, view, dead=reader.dead, forced=force_dead)
    return _Scene(
        run=merged,
        view=view,
        ends=ends,
        hows={i: how for i, how in hows.items() if how is not None} | lost,
        journals=reader.journals,
        partial=frozenset(i for i, j in reader.journals.items() if j.partial(ledger)),
        lost=tuple(lost),
    )


def _lost_producers(run: RunFold, view: StoreView, *, dead: Collection[str], forced: Collection[str]) -> dict[str, How]:
    """Producers without a journal that are known to have ended: a ``.dead`` mark, an operator, or an earlier recovery says so. Of the
    others nothing is decided; the audit names them."""
    out: dict[str, How] = {}
    for inc in sorted({*view.present, *run.missing_journals()} - set(run.journals)):
        if inc.startswith("env.") and (inc in dead or inc in forced or run.adopted(inc)):
            out[inc] = "dead" if inc in dead else "forced"
    return out


def _check_creates_once(ledger: Ledger) -> None:
    if ledger.store is not None and not probe(ledger.store).create_only:
        _log.warning("%s ignores If-None-Match: see to it that no other recovery or orchestrator is at work on this run", ledger.store.url)


def _withdraw(journal: Journal, ledger: Ledger) -> None:
    """Nothing was decided: closes this incarnation. What it could not close the next recovery takes over."""
    with contextlib.suppress(JournalPoisoned, StoreError):
        journal.append(records.Close(now_ms()))
        journal.sync(retry_s=0.0)
        release_lock(ledger, journal.inc)


def _to_adopt(scene: _Scene) -> list[str]:
    return [h for h in scene.hows if (h in scene.run.journals or h in scene.lost) and not scene.run.adopted(h)]


def _record(journal: Journal, ledger: Ledger, scene: _Scene, plan: RecoveryPlan) -> None:
    """Fences, adoptions, decisions: durable together before anything is removed (W1)."""
    for h in _to_adopt(scene):
        fence(ledger, h, by=journal.inc, ended=scene.run.journals)  # everyone has ended, else there is no scene
        failpoint("recover.after_fence")
        if h in scene.journals:
            sync_journal(ledger, scene.journals[h])
        for record in adopt_records(h, how=scene.hows[h], end=scene.ends.get(h, 0), settlement=plan.settlements.get(h), ms=now_ms()):
            journal.append(record)
        failpoint("recover.after_adopt")
    if plan.recovered:
        write_drop(journal, plan.recovered, "recovered")
    if plan.unjournaled:
        write_drop(journal, plan.unjournaled, "unjournaled")
    journal.sync()
    failpoint("recover.after_sync")


def _remove(
    store: Store, ledger: Ledger, journal: Journal, plan: RecoveryPlan, *, section: LedgerSection, deadline_s: float
) -> tuple[str, ...]:
    pending: list[str] = []
    for ids, attempt in ((plan.redo, 2), (plan.recovered + plan.unjournaled, 1)):
        for at in range(0, len(ids), section.batch_ids_max):
            batch = ids[at : at + section.batch_ids_max]
            check_fence(ledger, journal.inc)
            outcome = delete_objects(store, batch, deadline_s=deadline_s, threads=section.delete_threads)
            failpoint("recover.after_delete")
            if outcome.done:
                write_done(journal, outcome.done, absent=outcome.absent, attempt=attempt)
            failpoint("recover.after_done")
            pending += outcome.failed
    return tuple(pending)


def _closing(scene: _Scene, plan: RecoveryPlan, *, final: bool, remove_unexpected: bool, force_dead: Collection[str]) -> records.Close:
    counters = {
        "final": int(final),
        "incarnations": len(scene.run.journals),
        "dropped": len(plan.recovered) + len(plan.unjournaled),
        "remove_unexpected": int(remove_unexpected),
        "force_dead": len(force_dead),
    }
    return records.Close(now_ms(), counters={name: n for name, n in counters.items() if n})


def _legal(name: str) -> bool:
    """Whether the store would touch a name at all; an illegal one is reported and left to the operator."""
    try:
        check_name(name)
    except BadRef:
        return False
    return True
