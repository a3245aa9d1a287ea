"""Seeded histories of whole runs end PROVED and as somebody who saw everything expects; every broken rule is noticed.

More seeds, and the seeds that each broken rule took: ``python -m tools.simulate``.
"""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.simulation.chooser import Chooser
from tests.support.simulation.interleave import QUIET, explore
from tests.support.simulation.play import MUTANTS, Outcome, judge, play
from tests.support.simulation.surroundings import Scenario
from tests.support.simulation.world import World
from tools.simulate import ROOT, play_seeds

SEEDS: Final = 5_000
EVENTS: Final = (
    "env killed", "orc killed", "trn killed", "rec killed", "power lost", "record torn by a full disk", "segment upload failed",
    "reply lost", "reply doubled", "reply came twice", "reply of an adopted worker refused", "cancel sent", "cancel lost", "cancel doubled",
    "worker adopted while the run goes on", "orchestrator succeeded another", "worker rotated", "removal failed", "removals redone",
    "step trained", "step replayed", "earlier step inherited", "objects parked for replay", "released step refused", "padding dummy",
    "commit by checkpoint", "commit by fetched", "commit by keep_last", "declared dead and alive", "zombie woke", "object stolen",
)  # fmt: skip
"""What the histories must contain."""
POLICIES: Final = ("checkpoint", "fetched", "keep_last")


@pytest.mark.timeout(900)
@pytest.mark.fault(8)
def test_five_thousand_random_histories_end_as_they_must() -> None:
    blocks = list(play_seeds(0, SEEDS, jobs=min(2, os.cpu_count() or 1)))
    assert sum(b["count"] for b in blocks) == SEEDS
    assert [v for b in blocks for v in b["bad"]] == []
    assert sum(b["verdicts"]["PROVED"] for b in blocks) > 0.8 * SEEDS, "the others have a zombie or a thief"
    assert sum(b["crashes"] for b in blocks) > 2 * SEEDS, "too few crashes to show anything"
    assert sum(b["objects"] for b in blocks) > 10 * SEEDS, "too few objects to show anything"
    events = sum((Counter(b["events"]) for b in blocks), Counter[str]())
    assert {name: events[name] for name in EVENTS if events[name] < SEEDS // 250} == {}, "hardly ever happened"


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_broken_rule_is_noticed(mutant: str) -> None:
    for seed in range(1_500):
        if play(seed, mutant=mutant).faults:
            return
    pytest.fail(f"nobody noticed that {MUTANTS[mutant]}")


def test_a_seed_names_one_history_in_every_process() -> None:
    """Whatever the order of sets of strings is, which differs from process to process."""
    code = "from tests.support.simulation.play import play; print([play(seed) for seed in range(40)])"
    said = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": number}, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for number in ("1", "2")
    ]
    assert said[0] == said[1]


SMALL_SEED: Final = 20
SMALL: Final = replace(QUIET, ops=220, orchestrates=("ask",) * 3 + ("receive",) * 5 + ("reject", "cancel", "ship", "ship", "adopt"))
"""A short run in which nothing fails but the one process that is told to."""


def crashed(at: int, kind: str, *, power: bool, scenario: Scenario = SMALL, recovery_at: int = 0) -> tuple[Outcome, World]:
    world = World(Chooser(SMALL_SEED), replace(scenario, power_p=float(power)), crash_at=at, crash_kind=kind, recovery_crash_at=recovery_at)
    return judge(world, SMALL_SEED), world


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power lost"])
@pytest.mark.parametrize("kind", ["process", "node", "all"])
@pytest.mark.parametrize("segments", [False, True], ids=["journals", "segments"])
def test_a_crash_at_every_operation_of_a_small_run_is_survived(kind: str, power: bool, segments: bool) -> None:
    scenario = replace(SMALL, segments=segments)
    wrong = [(at, o.faults) for at in range(1, SMALL.ops + 1) if (o := crashed(at, kind, power=power, scenario=scenario)[0]).faults]
    assert wrong == []


def test_the_small_run_has_every_kind_of_operation() -> None:
    """What the crashes above cut: without takes, ships, steps, drops and removals they would show nothing."""
    _, world = crashed(0, "process", power=False)
    records = {type(r).__name__ for d in world.disks.values() for _, r in d.records}
    assert records == {"Open", "Keep", "Take", "Ship", "StepRecord", "Drop", "Done", "Adopt", "Close"}
    assert world.checkpoint >= 1


@pytest.mark.fault(8)
@pytest.mark.parametrize("power", [False, True], ids=["killed", "power lost"])
def test_a_recovery_that_dies_at_every_operation_converges(power: bool) -> None:
    for at in (80, 150, 220):
        operations = crashed(at, "all", power=power)[1].recovery_ops
        assert operations > 20, "the recovery has too little to do"
        wrong = [(at, k, o.faults) for k in range(1, operations + 1) if (o := crashed(at, "all", power=power, recovery_at=k)[0]).faults]
        assert wrong == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 32),
    scenario=st.builds(
        Scenario,
        ops=st.integers(1, 400),
        workers=st.integers(1, 3),
        crash_p=st.sampled_from([0.0, 0.01, 0.05]),
        power_p=st.sampled_from([0.0, 0.4, 1.0]),
        mail_lost_p=st.sampled_from([0.0, 0.5]),
        mail_twice_p=st.sampled_from([0.0, 0.5]),
        delete_fails_p=st.sampled_from([0.0, 0.5]),
        full_p=st.sampled_from([0.0, 0.02]),
        segments=st.booleans(),
        policy=st.sampled_from(POLICIES),
        keep_last=st.integers(1, 3),
        clean_end=st.booleans(),
    ),
)
def test_any_valid_history_audits_clean(seed: int, scenario: Scenario) -> None:
    assert play(seed, scenario=scenario).faults == []


@pytest.mark.fault(17, 20)
@pytest.mark.parametrize("crash", ["", "env", "orc"], ids=["nobody dies", "the worker may die", "the orchestrator may die"])
def test_a_cancel_that_crosses_the_reply_in_any_way_leaves_exactly_one_decision(crash: str) -> None:
    found = explore(crash=crash)
    assert found.wrong == []
    assert found.states > 1_000
    assert {"abandoned", "never_sent", "recovered", "taken, late", "taken, recovered"} <= set(found.outcomes)


@pytest.mark.parametrize("mutant", ["take_after_nack", "drop_without_nack"])
def test_the_crossings_notice_a_broken_rule(mutant: str) -> None:
    assert explore(mutant=mutant).wrong != []
