"""Node lists and array tasks as Slurm writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsref.errors import ConfigError
from fsref.pipeline.slurm.hostlist import expand, tasks


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("login", ["login"]),
        ("gpu[01-03,07],login", ["gpu01", "gpu02", "gpu03", "gpu07", "login"]),
        ("a[9-11]", ["a9", "a10", "a11"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("n[1,1],n1", ["n1"]),
        ("n[1-2].example.org", ["n1.example.org", "n2.example.org"]),
        (" a , b ", ["a", "b"]),
    ],
)
def test_node_lists_expand_in_order_and_keep_leading_zeros(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text", ["n[1-", "n]1[", "n[[1]]", "n[3-1]", "n[a-b]", "n[]", "a,,b", "a b", "n[0-99999999]", "n[1-60000]m[1-60000]"]
)
def test_what_slurm_would_not_take_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"node list"):
        expand(text)


@given(st.text(alphabet="n[]-,:0123456789 %", max_size=12))
def test_any_text_expands_or_is_refused_with_one_error(text: str) -> None:
    for parse in (expand, tasks):
        try:
            parse(text)
        except ConfigError:
            continue


@pytest.mark.parametrize(("text", "numbers"), [("0-3", [0, 1, 2, 3]), ("1,4-10:3%2", [1, 4, 7, 10]), ("7", [7]), ("2,2", [2])])
def test_array_tasks(text: str, numbers: list[int]) -> None:
    assert tasks(text) == numbers


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-3%x", "1-4:0"])
def test_array_tasks_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="array"):
        tasks(text)
