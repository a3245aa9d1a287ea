"""Fields that no engine has a form for: declared, sent under their own name, checked like the known ones."""

from typing import Any

import numpy as np
import pytest

from fsref.errors import WireError
from fsref.refs import Alignment, Column, Field, Ragged
from fsref.wire.openfields import decode_open_field, encode_open_field

WEIGHTS = Field(name="routing_weights", alignment=Alignment.INPUT, dtype="float32", row_shape=(4, 2))
SCORES = Field(name="scores", alignment=Alignment.TARGET, dtype="float16", row_shape=())
PICKS = Field(name="picks", alignment=Alignment.TARGET, columns=(Column("ids", "int32"), Column("w", "float32")))


def decode(value: Any, field: Field) -> Any:
    """As of a request with a prompt of 5 tokens, wanted from 2 on, and 3 completion tokens."""
    return decode_open_field(value, field, start=2, prompt_count=5, token_count=8)


def test_dense_rows_stand_where_their_alignment_says() -> None:
    rows = np.arange(5 * 8, dtype=np.float32).reshape(5, 4, 2)
    first, got = decode(encode_open_field(rows), WEIGHTS)
    assert (first, got.tobytes()) == (2, rows.tobytes())
    first, got = decode(encode_open_field(np.ones(3, np.float16)), SCORES)
    assert (first, got.shape) == (5, (3,))
    assert decode(None, WEIGHTS) is None


def test_the_last_sampled_tokens_input_row_may_be_absent_and_no_other() -> None:
    for count, fits in ((4, False), (5, True), (6, True), (7, False)):
        rows = encode_open_field(np.zeros((count, 4, 2), np.float32))
        if fits:
            assert len(decode(rows, WEIGHTS)[1]) == count
        else:
            with pytest.raises(WireError, match=f"{count} rows found, 5 to 6 needed"):
                decode(rows, WEIGHTS)


def test_ragged_columns_keep_their_pairs() -> None:
    given = Ragged(np.asarray([2, 0, 1], np.int32), {"ids": np.asarray([7, 2, 9]), "w": np.asarray([0.6, 0.4, 1.0], np.float32)})
    got = decode(encode_open_field(given), PICKS)
    assert got.counts.tolist() == [2, 0, 1]
    assert list(zip(got.columns["ids"].tolist(), got.columns["w"].tolist(), strict=True)) == [
        (7, pytest.approx(0.6)),
        (2, pytest.approx(0.4)),
        (9, 1.0),
    ]


@pytest.mark.parametrize(
    ("value", "field", "message"),
    [
        (encode_open_field(np.zeros((5, 4, 3), np.float32)), WEIGHTS, r"\(4, 3\) found, \(4, 2\) declared"),
        ([1, 2], WEIGHTS, "base64 of .npy bytes expected, list found"),
        (encode_open_field(np.zeros(2, np.float16)), SCORES, "2 rows found, 3 to 3 needed"),
        ({"counts": "x"}, PICKS, r"an object with \['counts', 'ids', 'w'\]"),
        ("text", PICKS, "an object with"),
        (
            encode_open_field(Ragged(np.asarray([1, 1, 1]), {"ids": np.zeros(2, np.int32), "w": np.zeros(3)})),
            PICKS,
            "3 values by the counts",
        ),
        (encode_open_field(Ragged(np.asarray([1, -1, 3]), {"ids": np.zeros(3), "w": np.zeros(3)})), PICKS, "from 0 on"),
    ],
)
def test_a_form_that_is_not_the_declared_one_is_refused(value: Any, field: Field, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode(value, field)
