"""The contract of the needed fields."""

import numpy as np
import pytest

from fsref.envserver.capture import Capture
from fsref.envserver.payloads import MissingPolicy, branch_payload
from fsref.episodes.branches import Branch
from fsref.errors import MissingArrays
from fsref.refs import Payload, Schema, routed_experts, sampling_mask
from tests.envserver.test_capture import turn

SCHEMA = Schema((routed_experts(layer_ids=[0], top_k=1, expert_count=256), sampling_mask()))
IDS = [1, 2, 3, 4, 5, 6]


def build(*turns: object, missing: MissingPolicy = "strict", needed: tuple[str, ...] = ("routed_experts", "sampling_mask")) -> Payload:
    capture = Capture()
    capture.open("t")
    for t in turns:
        capture.add("t", t)  # type: ignore[arg-type]
    sampled = np.asarray([False, False, True, True, False, True])
    branch = Branch("t", 4, np.asarray(IDS, np.int32), sampled, sampled, np.zeros(6, np.float32), ())
    return branch_payload(capture, branch, schema=SCHEMA, needed=needed, missing=missing)


WHOLE = (turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6], start=3))
HOLE = (turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6], start=4))


def test_a_branch_with_all_rows_but_the_last_is_complete() -> None:
    assert set(build(*WHOLE).fields) == {"routed_experts", "sampling_mask"}


@pytest.mark.payload("A14", "G8")
def test_a_field_that_is_not_there_names_the_branch_and_the_fix() -> None:
    with pytest.raises(MissingArrays, match=r"branch t/4: field 'sampling_mask' is in run.fields.*--return-sampling-mask"):
        build(turn([1, 2], [3, 4], mask=False), turn([1, 2, 3, 4, 5], [6], start=3, mask=False))


@pytest.mark.payload("A14", "G8")
def test_a_field_that_was_asked_for_and_did_not_come_is_absent_in_fallback_runs() -> None:
    turns = (turn([1, 2], [3, 4], mask=False), turn([1, 2, 3, 4, 5], [6], start=3, mask=False))
    payload = build(*turns, missing="fallback")
    assert (set(payload.fields), payload.absent) == ({"routed_experts"}, ("sampling_mask",))


@pytest.mark.payload("A8")
def test_a_hole_before_a_sampled_token_is_an_error_in_strict_runs() -> None:
    with pytest.raises(MissingArrays, match=r"'routed_experts' lacks 1 of 6 rows.*first \[3, 4\).*run.missing = \"fallback\""):
        build(*HOLE)


@pytest.mark.payload("A8")
def test_a_hole_is_carried_as_coverage_in_fallback_runs() -> None:
    payload = build(*HOLE, missing="fallback")
    assert [(r.start, r.stop) for r in payload.fields["routed_experts"].missing] == [(3, 4), (5, 6)]


def test_a_sampled_token_without_its_mask_is_an_error_in_strict_runs() -> None:
    with pytest.raises(MissingArrays, match=r"'sampling_mask' lacks 1 of 6 rows"):
        build(WHOLE[0], turn([1, 2, 3, 4, 5], [6], start=3, mask=False))


def test_fields_that_the_run_does_not_name_are_left_out() -> None:
    assert set(build(*WHOLE, needed=()).fields) == {"routed_experts", "sampling_mask"}
