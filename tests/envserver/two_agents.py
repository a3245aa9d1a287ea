"""An environment of two agents, of whom only the solver trains."""

from typing import Any

import verifiers.v1 as vf


class TwoAgentsConfig(vf.EnvConfig):  # type: ignore[misc]  # verifiers is untyped
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class TwoAgents(vf.Env[TwoAgentsConfig]):  # type: ignore[misc]
    async def setup(self, agents: Any) -> None:
        agents.judge.trainable = False

    async def run(self, task: Any, agents: Any) -> None:
        await agents.solver.run(task)
        await agents.judge.run(task)


__all__ = ["TwoAgents"]
