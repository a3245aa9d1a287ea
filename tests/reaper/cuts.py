"""A process that ends in the middle of what it does, and a run that is left to be recovered.

The end is an exception that nothing catches; whoever cuts also lets the journal's lock go, as it does with a killed process.
"""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from fsref.errors import StoreError
from fsref.refs import object_name
from tests.reaper.stage import Stage

AnyStage = TypeVar("AnyStage", bound=Stage)


class Killed(BaseException):
    """The process ends here."""


class Cutter:
    """Counts operations; cuts the one that it is told to, before or after it takes effect (or fails). Then nothing works any more."""

    def __init__(self, at: int, *, after: bool) -> None:
        self.at, self.after, self.count, self.dead = at, after, 0, False

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            if self.dead:
                raise Killed
            self.count += 1
            if self.count != self.at:
                return function(*args, **kwargs)
            self.dead = True
            if self.after:
                with contextlib.suppress(StoreError):
                    function(*args, **kwargs)
            raise Killed

        return operation


def crashed(stage: AnyStage) -> AnyStage:
    """The stage with a run whose every process was killed, with something of each kind left."""
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    trn.taken(stage.ship(orc, 0, stage.reply(env, orc, 2)))
    trn.used(0)
    trn.drop_steps(0, 0)
    stage.store.delete([object_name(stage.batches[0][0])])
    stage.reply(env, orc)
    stage.put(env)
    stage.put(env, keep=False)
    for holder in (env, orc, trn):
        stage.kill(holder)
    return stage
