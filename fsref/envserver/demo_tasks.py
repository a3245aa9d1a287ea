"""The demo taskset: write only characters of the kind that the prompt names, and all of them alike.

Made for a tiny random model: the reward is the share of the reply's characters that are of that kind, each of them counted up to its
even part. So it has a slope everywhere (a random model scores about a quarter on ``vowels``), a policy gradient raises it within tens
of small steps, and a policy that repeats one character scores badly: rewards of a group never become all equal. Tasks follow from
the seed and their index alone. The conversation runs in the env server itself, without a program of its own: about a tenth of a
second an episode beside the sampling.

Knobs under ``[env.args]``: ``count``, ``seed``, ``kinds``, ``turns``, ``two_turn_share``, ``fork_share``. Reply lengths follow
``sampling.tokens_max`` and the model's end of turn.
"""

import random
import string
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import httpx
import verifiers.v1 as vf
from pydantic import Field

KINDS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "vowels": frozenset("aeiou"),
        "letters": frozenset(string.ascii_lowercase),
        "first": frozenset(string.ascii_lowercase[:13]),
        "last": frozenset(string.ascii_lowercase[13:]),
        "digits": frozenset(string.digits),
    }
)
"""What a prompt may ask for; ``first`` and ``last`` are the halves of the alphabet."""

_OPENINGS: Final = ("please write only", "write only", "answer with only", "say only")
_WORDS: Final = ("river", "mountain", "forest", "table", "world", "line", "green", "small", "seven", "hello")


def share_of(text: str, kind: str) -> float:
    """Share of the characters of ``text`` that are of ``kind``, each counted up to its even part; 0 for an empty text."""
    legal = KINDS[kind]
    return sum(min(text.count(c) / len(text), 1 / len(legal)) for c in legal) if text else 0.0


class DemoData(vf.TaskData):  # type: ignore[misc]  # verifiers is untyped
    """One prompt."""

    kind: str = "vowels"
    turns: int = 1
    """Model turns; after each but the last the user asks for more."""
    fork: bool = False
    """After the last turn, ask again from the first reply on: a second branch that shares the first turn."""


class DemoTask(vf.Task[DemoData]):  # type: ignore[misc]  # verifiers is untyped
    """Scores a conversation."""

    @vf.reward  # type: ignore[untyped-decorator]  # verifiers is untyped
    async def share(self, trace: Any) -> float:
        """Mean over all replies, so that every branch has a part in it."""
        texts = [f"{m.reasoning_content or ''}{m.content or ''}" for m in trace.assistant_messages]
        return sum(share_of(t, self.data.kind) for t in texts) / len(texts) if texts else 0.0


class DemoConfig(vf.TasksetConfig):  # type: ignore[misc]  # verifiers is untyped
    """Knobs."""

    count: int = Field(256, ge=1)
    """Tasks."""
    seed: int = 0
    kinds: tuple[str, ...] = ("vowels",)
    """Kinds to draw from."""
    turns: int = Field(1, ge=1)
    """Turns of every task."""
    two_turn_share: float = Field(0.0, ge=0, le=1)
    """Share of tasks with at least two turns."""
    fork_share: float = Field(0.0, ge=0, le=1)
    """Share of tasks whose conversation forks."""


class DemoTaskset(vf.Taskset[DemoTask, DemoConfig]):  # type: ignore[misc]  # verifiers is untyped
    """``count`` tasks."""

    def load(self) -> Iterator[DemoTask]:
        """Every task from its own generator, so that task n is the same whatever ``count`` is."""
        config = self.config
        if not config.kinds or not KINDS.keys() >= set(config.kinds):
            raise ValueError(f"kinds {config.kinds} found; name at least one of {sorted(KINDS)}")
        for index in range(config.count):
            draw = random.Random(f"{config.seed}/{index}")  # noqa: S311  # tasks, not secrets
            kind = draw.choice(config.kinds)
            prompt = f"{draw.choice(_OPENINGS)} {kind}: {draw.choice(_WORDS)} {draw.randrange(100)}"
            turns = max(config.turns, 2) if draw.random() < config.two_turn_share else config.turns
            fork = draw.random() < config.fork_share
            yield DemoTask(DemoData(prompt=prompt, kind=kind, turns=turns, fork=fork), config.task)


class DemoHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]  # verifiers is untyped
    """No knobs."""


class DemoHarness(vf.Harness[DemoHarnessConfig]):  # type: ignore[misc]  # verifiers is untyped
    """Holds the conversation from within the env server."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(  # noqa: PLR0917  # verifiers' signature
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: DemoData
    ) -> vf.ProgramResult:
        """One conversation; a model call that fails ends the program, and with it the episode, with its message."""
        del trace, runtime, mcp_urls
        async with httpx.AsyncClient(trust_env=False, timeout=None, headers={"authorization": f"Bearer {secret}"}) as http:  # noqa: S113
            messages = [{"role": "user", "content": data.prompt_text}]
            first: list[dict[str, str]] = []
            asked = [f"more {data.kind} {turn}" for turn in range(1, data.turns)]
            for question in (*asked, ""):
                response = await http.post(f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages})
                if response.is_error:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=response.text)
                messages.append(_reply(response))
                first = first or list(messages)
                if question:
                    messages.append({"role": "user", "content": question})
            if data.fork:
                again = [*first, {"role": "user", "content": f"other {data.kind}"}]
                response = await http.post(f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": again})
                if response.is_error:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=response.text)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def _reply(response: httpx.Response) -> dict[str, str]:
    message = response.json()["choices"][0]["message"]
    return {"role": "assistant", "content": message.get("content") or "", **_reasoning(message)}


def _reasoning(message: Mapping[str, Any]) -> dict[str, str]:
    text = message.get("reasoning_content")
    return {"reasoning_content": text} if text else {}


__all__ = ["DemoHarness", "DemoTaskset"]
