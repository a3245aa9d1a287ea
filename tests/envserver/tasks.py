"""The demo taskset with one more knob: a conversation that breaks after its last turn."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from fsref.envserver.demo_tasks import DemoConfig, DemoData, DemoHarness, DemoTask


class BreakingData(DemoData):
    fail: bool = False


class BreakingTask(DemoTask, vf.Task[BreakingData]):  # type: ignore[misc]  # verifiers is untyped
    pass


class BreakingTaskset(vf.Taskset[BreakingTask, DemoConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[BreakingTask]:
        yield BreakingTask(BreakingData(prompt="please write only vowels: hello"), self.config.task)


class BreakingHarness(DemoHarness):
    async def launch(self, *args: Any) -> Any:
        result = await super().launch(*args)
        if args[-1].fail:
            raise RuntimeError("broken on purpose")
        return result


__all__ = ["BreakingHarness", "BreakingTaskset"]
