"""Traces to plain data, and the rule which branches have an object.

Both sides of the wire use ``training_branches``: the env server keeps one object for each, the orchestrator makes one sample of each. A
branch counts if its trace is finished, ok, trainable and not dropped, verifiers calls the branch trainable, and at least one of
its sampled tokens trains here. A node that several branches share trains in the first of them only.

Shape letter: T tokens of a branch.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fsref.errors import BadRef
from fsref.refs import BYTES_OBJECT_MAX, PayloadRef, split_object_id

KEY: Final = "fsref"
"""Where references travel: ``trace.info[KEY]`` and ``RunResponse.head[KEY]``."""
VERSION: Final = 1


@dataclass(frozen=True, eq=False)
class Branch:
    """One branch that trains."""

    trace_id: str
    index: int
    """verifiers' index among the trace's branches."""
    token_ids: NDArray[np.int32]
    sampled: NDArray[np.bool_]
    """[T], True where the model sampled the token, trained or not."""
    loss_mask: NDArray[np.bool_]
    """[T], ``sampled`` without what an earlier branch trains."""
    logprobs: NDArray[np.float32]
    """[T], the sampler's; 0 where the token was not sampled."""
    versions: tuple[str, ...]
    """The engine's labels of the weights that sampled it, in order; empty where it sends none."""

    @property
    def name(self) -> str:
        return f"{self.trace_id}/{self.index}"


@dataclass(frozen=True, eq=False)
class BranchSample:
    """A branch with what the orchestrator needs to train it."""

    trace_id: str
    branch_index: int
    agent: str
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    reward: float
    ref: PayloadRef | None
    """``None`` where the env server is not fsref's, or the branch has no arrays."""
    versions: tuple[str, ...]

    @property
    def name(self) -> str:
        """``<trace>/<branch>``."""
        return f"{self.trace_id}/{self.branch_index}"


@dataclass(frozen=True)
class TraceResult:
    """What one agent did in an episode, without its tokens."""

    trace_id: str
    agent: str
    trainable: bool
    ok: bool
    reward: float
    metrics: Mapping[str, float]
    turns: int
    sampled_tokens: int
    truncated: bool
    """The last turn hit a token or context limit."""
    errors: tuple[str, ...]


def training_branches(trace: Any) -> Iterator[Branch]:
    """The branches of a verifiers trace (live or from the wire) that train, in verifiers' order."""
    if not trace.ok or trace.dropped is not None or not trace.agent.trainable:
        return
    trained: set[int] = set()
    for branch in trace.branches:
        if not branch.trainable:
            continue
        loss_mask = _join((_unless(n.mask, id(n) in trained) for n in branch.nodes), np.bool_)
        trained.update(id(n) for n in branch.nodes if n.sampled)
        if loss_mask.any():
            yield Branch(
                trace_id=trace.id,
                index=branch.index,
                token_ids=_join((n.token_ids for n in branch.nodes), np.int32),
                sampled=_join((n.mask for n in branch.nodes), np.bool_),
                loss_mask=loss_mask,
                logprobs=np.asarray(branch.logprobs, dtype=np.float32),
                versions=_versions(branch.nodes),
            )


def branch_samples(trace: Any, *, run: str) -> list[BranchSample]:
    """The samples of a trace from the wire, with the references that its env server left; raises ``BadRef`` if those are malformed or
    of another run.
    """
    refs = branch_refs(trace.info, run=run)
    return [
        BranchSample(
            trace_id=b.trace_id,
            branch_index=b.index,
            agent=trace.agent.name,
            token_ids=b.token_ids,
            loss_mask=b.loss_mask,
            logprobs=b.logprobs,
            reward=float(trace.reward),
            ref=refs.get(b.index),
            versions=b.versions,
        )
        for b in training_branches(trace)
    ]


def trace_result(trace: Any) -> TraceResult:
    """The summary of a trace from the wire."""
    return TraceResult(
        trace_id=trace.id,
        agent=trace.agent.name,
        trainable=bool(trace.agent.trainable) and trace.dropped is None,
        ok=bool(trace.ok),
        reward=float(trace.reward),
        metrics={k: float(v) for k, v in trace.metrics.items() if v is not None},
        turns=int(trace.num_turns),
        sampled_tokens=sum(int(np.count_nonzero(n.mask)) for n in trace.nodes if n.sampled),
        truncated=bool(trace.is_truncated),
        errors=tuple(f"{e.type}: {e.message}" for e in trace.errors),
    )


def info_of(run: str, refs: Mapping[int, PayloadRef]) -> dict[str, Any]:
    """The JSON form that travels in ``trace.info[KEY]``."""
    return {"v": VERSION, "run": run, "branches": {str(index): ref.to_json() for index, ref in refs.items()}}


def branch_refs(info: Mapping[str, Any], *, run: str) -> dict[int, PayloadRef]:
    """Inverse of ``info_of`` on a trace's whole info: references by branch index, none if there are none.

    Raises ``BadRef`` for anything malformed, and for references of another run than ours: a name means something in its own run only.
    """
    found = info.get(KEY)
    if found is None:
        return {}
    if not isinstance(found, Mapping) or found.get("v") != VERSION or not isinstance(found.get("branches"), Mapping):
        raise BadRef(f"trace.info[{KEY!r}] is not of version {VERSION}: {found!r:.80}")
    if found.get("run") != run:
        raise BadRef(f"trace.info[{KEY!r}] is of run {found.get('run')!r:.140}, this is run {run!r}")
    refs = {}
    for index, ref in found["branches"].items():
        if not (isinstance(index, str) and index.isascii() and index.isdigit()):
            raise BadRef(f"trace.info[{KEY!r}] names a branch {index!r:.40}")
        refs[int(index)] = PayloadRef.decode(ref)
    return refs


def head_of(objects: Mapping[str, int]) -> dict[str, Any]:
    """The JSON form of every object that a reply names, with its bytes, for ``RunResponse.head[KEY]``."""
    return {"v": VERSION, "objects": list(objects), "bytes": list(objects.values())}


def head_objects(head: Mapping[str, Any] | None) -> dict[str, int]:
    """Inverse of ``head_of`` on a reply's whole head; none if there are none. Raises ``BadRef``."""
    found = (head or {}).get(KEY)
    if found is None:
        return {}
    try:
        pairs = list(zip(found["objects"], found["bytes"], strict=True))
        objects = {_producers_id(o): b for o, b in pairs}
    except (KeyError, TypeError, ValueError) as e:
        raise BadRef(f"the reply's head[{KEY!r}] is malformed: {found!r:.80}") from e
    if len(objects) != len(pairs) or not all(type(b) is int and 0 < b <= BYTES_OBJECT_MAX for b in objects.values()):
        raise BadRef(f"the reply's head[{KEY!r}] names an object twice, or one of an impossible size: {found!r:.80}")
    return objects


def _producers_id(object_id: Any) -> str:
    """An object id that an env server may give out; raises ``BadRef`` (a ``ValueError``) or ``TypeError``."""
    inc, _ = split_object_id(object_id)
    if not inc.startswith("env."):
        raise BadRef(f"{object_id} is not an env server's")
    return str(object_id)


def _join(parts: Iterable[Any], dtype: Any) -> NDArray[Any]:
    arrays = [np.asarray(p, dtype=dtype) for p in parts]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _unless(mask: Any, trained: bool) -> NDArray[np.bool_]:
    mask = np.asarray(mask, dtype=np.bool_)
    return np.zeros_like(mask) if trained else mask


def _versions(nodes: Iterable[Any]) -> tuple[str, ...]:
    seen: dict[str, None] = {}
    for node in nodes:
        for span in node.weight_versions or ():
            seen[str(span.version)] = None
    return tuple(seen)
