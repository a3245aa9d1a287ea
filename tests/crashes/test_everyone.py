"""The whole run at work, and killed at once; audited while it works."""

import random
import selectors
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from fsref.reaper import Verdict
from tests.support.roles import Child, Play


class Busy:
    """Two workers, an orchestrator and a trainer that are never idle: every answer leads to the next command."""

    def __init__(self, play: Play, seed: int, *, first_step: int = 0) -> None:
        self.play = play
        self.rng = random.Random(seed)
        self.envs = [play.env(f"math-{n}-0") for n in range(2)]
        self.orc, self.trn = play.orc(), play.trn()
        self.next_step = first_step
        self.begun = first_step
        self.doing: dict[int, tuple[str, Any]] = {}
        """By pid: the command that is not answered yet."""
        self.inbox: list[dict[str, Any]] = []
        self.held: list[str] = []
        self.shipped: list[int] = []
        self.trained: list[int] = []
        self.answers = 0
        self._selector = selectors.DefaultSelector()
        for child in (*self.envs, self.orc, self.trn):
            self._selector.register(child.stream, selectors.EVENT_READ, child)

    def work(self, answers: int, *, spare_s: float = 0.0) -> None:
        """Goes on until so many commands were answered, then lets the ones under way run for a moment more."""
        end = self.answers + answers
        while self.answers < end:
            self.start()
            for key, _ in self._selector.select(60.0):
                self.hear(key.data)
        self.start()
        self._selector.select(spare_s)

    def start(self) -> None:
        """Gives everyone who has nothing to do something to do."""
        for child in self.envs:
            if child.pid not in self.doing:
                self.tell(child, *self._for_env())
        if self.orc.pid not in self.doing and (command := self._for_orc()):
            self.tell(self.orc, *command)
        if self.trn.pid not in self.doing and (command := self._for_trn()):
            self.tell(self.trn, *command)

    def tell(self, child: Child, do: str, *args: Any) -> None:
        child.post(do, *args)
        self.doing[child.pid] = do, args

    def _for_env(self) -> tuple[Any, ...]:
        fate = self.rng.random()
        if fate < 0.15:
            return "put_and_discard", self.play.numbers(2)
        if fate < 0.3:
            return "reply_and_nack", self.play.request(), self.play.numbers(1)
        return "reply", self.play.request(), self.play.numbers(self.rng.randint(1, 3))

    def _for_orc(self) -> tuple[Any, ...] | None:
        if len(self.held) >= 6 and self.next_step < self.begun + len(self.trained) + 3:
            ids, self.held = self.held[:4], self.held[4:]
            self.next_step += 1
            return "ship", self.next_step - 1, ids
        if len(self.held) > 8:
            ids, self.held = self.held[:2], self.held[2:]
            return "drop", ids, self.rng.choice(["stale", "filtered"])
        if self.inbox:
            return "take", self.inbox.pop(self.rng.randrange(len(self.inbox)))
        return None

    def _for_trn(self) -> tuple[Any, ...] | None:
        if not self.shipped:
            return None
        step = self.shipped[0]
        if len(self.trained) % 3 == 2:
            return "train_checkpoint_commit", step
        return "train", step

    def hear(self, child: Child) -> None:
        """One answer and what follows from it."""
        answer = child.answer()
        do, args = self.doing.pop(child.pid)
        self.answers += 1
        if do == "reply":
            self.inbox += [answer] * (2 if self.rng.random() < 0.1 else 1)
        elif do == "take":
            self.held += answer
        elif do == "ship":
            self.shipped.append(args[0])
        elif do.startswith("train"):
            self.play.check_arrays(answer)
            self.trained.append(self.shipped.pop(0))

    def settle_down(self) -> None:
        """Waits for what is under way."""
        while self.doing:
            for key, _ in self._selector.select(60.0):
                self.hear(key.data)

    def close(self) -> None:
        self._selector.close()


@pytest.fixture
def busy() -> Iterator[list[Busy]]:
    """Runs that a test starts; closed at its end."""
    made: list[Busy] = []
    yield made
    for one in made:
        one.close()


def assert_a_kill_at_once_is_recovered(play: Play, made: list[Busy], seed: int, *, replay: bool) -> None:
    """All die at a random instant; recovery; the checkpoint's steps are not lost, the later ones replay; PROVED at the end."""
    rng = random.Random(seed)
    first = Busy(play, seed)
    made.append(first)
    first.work(rng.randrange(1, 90), spare_s=rng.random() * 0.01)
    play.kill_all()
    covered = play.checkpoint()
    done = play.recover(covered, replay="keep" if replay else "drop")
    assert (done.lost, done.pending, done.unexpected) == (0, (), ())
    found = play.audit()
    assert (found.totals.live, found.violations) == (done.parked, ()), "\n".join(found.render())
    assert len(play.objects()) == done.parked
    left = play.published_steps()
    if replay:
        trn = play.trn()
        for step in (s for s in left if s > covered):
            play.trained(trn, step)  # to the byte
        trn.end()
    second = Busy(play, seed + 1, first_step=max([*left, first.next_step, 0]) + 1)
    made.append(second)
    second.work(20)
    play.kill_all()
    play.assert_proved()


@pytest.mark.fault(12)
@pytest.mark.parametrize("replay", [True, False], ids=["replay", "drop"])
@pytest.mark.parametrize("seed", range(5))
def test_a_run_whose_every_process_is_killed_at_once_loses_and_leaks_nothing(play: Play, busy: list[Busy], seed: int, replay: bool) -> None:
    assert_a_kill_at_once_is_recovered(play, busy, seed, replay=replay)


@pytest.mark.slow
@pytest.mark.fault(12)
@pytest.mark.parametrize("seed", range(100, 150))
def test_at_fifty_more_instants(play: Play, busy: list[Busy], seed: int) -> None:
    assert_a_kill_at_once_is_recovered(play, busy, seed, replay=bool(seed % 2))


@pytest.mark.fault(64)
def test_a_run_that_is_audited_a_hundred_times_while_it_works_is_never_accused(play: Play, busy: list[Busy]) -> None:
    run = Busy(play, 7)
    busy.append(run)
    kept = []
    for _ in range(100):
        run.start()  # everyone works while the audit reads
        found = play.audit()
        assert (found.verdict, found.violations) == (Verdict.BALANCED, ()), "\n".join(found.render())
        kept.append(found.totals.kept)
        run.work(1)
    assert kept == sorted(kept)
    assert kept[-1] > 30
    run.settle_down()
    for child in (run.trn, run.orc, *run.envs):
        child.end()
    assert play.audit().violations == ()
    play.assert_proved()


@pytest.mark.fault(12)
def test_a_run_that_is_stopped_and_killed_in_its_sleep_is_recovered(play: Play, busy: list[Busy]) -> None:
    run = Busy(play, 3)
    busy.append(run)
    run.work(30)
    run.start()
    for child in (*run.envs, run.orc, run.trn):
        child.signal(signal.SIGSTOP)
    play.kill_all()
    play.assert_proved()
