"""Which branches train, and what travels about them."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("verifiers", reason="needs verifiers: install the extra of that name")

import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, Trace, TraceTask, WireTrace
from verifiers.v1.types import AssistantMessage, UserMessage, WeightVersionSpan

from fsref.episodes.branches import branch_refs, branch_samples, head_objects, head_of, info_of, trace_result, training_branches
from fsref.errors import BadRef
from fsref.refs import PayloadRef, Segment


def user(parent: int | None, *ids: int) -> MessageNode:
    return MessageNode(
        parent=parent, message=UserMessage(content=str(ids)), token_ids=np.asarray(ids, np.int32), mask=np.zeros(len(ids), np.bool_)
    )


def reply(parent: int, *ids: int, version: str = "1") -> MessageNode:
    """One token of scaffold, then sampled ones."""
    mask = np.arange(len(ids)) > 0
    return MessageNode(
        parent=parent,
        message=AssistantMessage(content=str(ids)),
        sampled=True,
        token_ids=np.asarray(ids, np.int32),
        mask=mask,
        logprobs=-np.asarray(ids[1:], np.float32),
        weight_versions=[WeightVersionSpan(version=version, start=0, end=len(ids) - 1)],
    )


def trace(*nodes: MessageNode, **changes: Any) -> Any:
    found = Trace(
        id="t",
        task=TraceTask(type="Task", data=vf.TaskData(prompt="x")),
        agent=AgentInfo(config=vf.AgentConfig()),
        nodes=list(nodes),
        ok=True,
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


FORK = (user(None, 1, 2), reply(0, 3, 4, 5), user(1, 6), reply(2, 7, 8, version="2"), user(1, 9), reply(4, 10, 11))


def test_a_branch_is_its_path_of_nodes() -> None:
    (branch,) = training_branches(trace(*FORK[:4]))
    assert (branch.name, branch.versions) == ("t/0", ("1", "2"))
    assert branch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert branch.token_ids.dtype == np.int32
    assert np.flatnonzero(branch.loss_mask).tolist() == [3, 4, 7]
    assert branch.logprobs.tolist() == [0, 0, 0, -4, -5, 0, 0, -8]
    assert [branch.logprobs.dtype.name, branch.loss_mask.dtype.name] == ["float32", "bool"]


def test_a_node_that_branches_share_trains_in_the_first_alone() -> None:
    one, two = training_branches(trace(*FORK))
    assert np.flatnonzero(one.loss_mask).tolist() == [3, 4, 7]
    assert two.token_ids.tolist() == [1, 2, 3, 4, 5, 9, 10, 11]
    assert np.flatnonzero(two.sampled).tolist() == [3, 4, 7]
    assert np.flatnonzero(two.loss_mask).tolist() == [7]
    assert (one.index, two.index) == (0, 1)


def test_a_branch_whose_every_sampled_token_trains_elsewhere_is_none() -> None:
    assert [b.index for b in training_branches(trace(*FORK[:4], user(1, 9)))] == [0]


@pytest.mark.parametrize("changes", [{"ok": False}, {"dropped": "stale"}, {"nodes": []}])
def test_a_trace_that_does_not_train_has_no_branches(changes: dict[str, Any]) -> None:
    assert list(training_branches(trace(*FORK, **changes))) == []


def test_an_agent_that_does_not_train_has_no_branches() -> None:
    found = trace(*FORK)
    found.agent.trainable = False
    assert list(training_branches(found)) == []


def ref(number: int, token_count: int = 8) -> PayloadRef:
    segment = Segment(f"env.x.0123456789abcdef/{number}", 100 + number, 0, token_count, 0, b"\x01")
    return PayloadRef(b"s" * 8, token_count, b"t" * 8, token_count, (segment,))


def test_samples_from_the_wire_have_their_references_and_equal_the_live_branches() -> None:
    live = trace(*FORK)
    live.info["fsref"] = info_of("r1", {0: ref(0), 1: ref(1)})
    samples = branch_samples(WireTrace.model_validate(live.model_dump(mode="json", context={"float_decimals": None})), run="r1")
    assert [s.ref for s in samples] == [ref(0), ref(1)]
    assert [s.name for s in samples] == ["t/0", "t/1"]
    for sample, branch in zip(samples, training_branches(live), strict=True):
        np.testing.assert_array_equal(sample.token_ids, branch.token_ids)
        np.testing.assert_array_equal(sample.loss_mask, branch.loss_mask)
        np.testing.assert_array_equal(sample.logprobs, branch.logprobs)


def test_a_plain_server_leaves_samples_without_references() -> None:
    assert [s.ref for s in branch_samples(trace(*FORK), run="r1")] == [None, None]


def test_a_summary_has_no_tokens() -> None:
    found = trace(*FORK)
    found.record_reward("share", 0.25)
    found.record_metric("length", 3)
    result = trace_result(found)
    assert (result.reward, result.metrics, result.turns, result.sampled_tokens, result.ok) == (0.25, {"length": 3.0}, 3, 4, True)


def reference(object_id: str) -> list[Any]:
    """A reference to another object, as an env server that lies would send it."""
    found = ref(0).to_json()
    found[4][0][0] = object_id
    return found


HOSTILE_IDS = [
    "../../etc/passwd", "/etc/passwd", "%2e%2e/0", "file:///etc/passwd", "http://127.0.0.1/x", "simplecache::file:///etc/hostname",
    "env.x.0123456789abcdef/../0", "env.x.0123456789abcdef/0\x00", "env.x.0123456789abcdef/0\n", "env.x.0123456789abcdef/00", "A" * 10_000,
    "fsref:r2/env.x.0123456789abcdef/0", "env.x.0123456789abcdef", "", "s3://bucket/key", "env.\u0430.0123456789abcdef/0",
]  # fmt: skip

MALFORMED: list[Any] = [
    [],
    {"v": 2, "run": "r1", "branches": {}},
    {"v": 1, "run": "r1"},
    {"v": 1, "run": "r1", "branches": {"x": []}},
    {"v": 1, "run": "r1", "branches": {"0": [1]}},
    {"v": 1, "run": "r1", "branches": {"-1": []}},
    {"v": 1, "run": "r2", "branches": {"0": ref(0).to_json()}},
    {"v": 1, "branches": {"0": ref(0).to_json()}},
    *({"v": 1, "run": "r1", "branches": {"0": reference(i)}} for i in HOSTILE_IDS),
]


@pytest.mark.fault(54)
@pytest.mark.parametrize("info", MALFORMED)
def test_a_malformed_info_is_refused(info: object) -> None:
    with pytest.raises(BadRef):
        branch_refs({"fsref": info}, run="r1")


def test_the_head_of_a_reply_lists_objects_with_their_bytes() -> None:
    objects = {"env.x.0123456789abcdef/0": 10, "env.x.0123456789abcdef/1": 20}
    assert head_objects({"fsref": head_of(objects)}) == objects
    assert head_objects({}) == {}
    assert head_objects(None) == {}


GOOD = "env.x.0123456789abcdef/0"


@pytest.mark.fault(54)
@pytest.mark.parametrize(
    "head",
    [
        1, {}, {"objects": ["a"], "bytes": []}, {"objects": 1, "bytes": 1}, {"objects": [GOOD], "bytes": [0]},
        {"objects": [GOOD], "bytes": [1 << 40]}, {"objects": [GOOD], "bytes": [True]}, {"objects": [GOOD, GOOD], "bytes": [1, 1]},
        {"objects": ["orc.x.0123456789abcdef/0"], "bytes": [1]}, {"objects": [[GOOD]], "bytes": [1]}, {"objects": [7], "bytes": [1]},
        *({"objects": [GOOD, i], "bytes": [1, 1]} for i in HOSTILE_IDS),
    ],
)  # fmt: skip
def test_a_malformed_head_is_refused(head: object) -> None:
    with pytest.raises(BadRef):
        head_objects({"fsref": head})
