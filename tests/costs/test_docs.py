"""docs/costs.md: its files load, and its table is what the tool says of them."""

import re
from pathlib import Path

import msgspec

from tools.s3_cost import Prices, Shape, report

PAGE = (Path(__file__).parents[2] / "docs" / "costs.md").read_text()


def test_the_pages_files_load_and_its_table_is_the_tools() -> None:
    prices, shape = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert msgspec.toml.decode(prices, type=Prices).put_1000 == 0
    found = msgspec.toml.decode(shape, type=Shape)
    assert found == Shape()
    assert "\n".join(report(found)) in PAGE
