"""docs/object-storage.md: its settings load, and it names every capability and setting that it should."""

import dataclasses
import re
import tomllib
from pathlib import Path

from fsref.config import build
from fsref.store import Capabilities

PAGE = (Path(__file__).parents[2] / "docs" / "object-storage.md").read_text()


def test_every_profile_of_the_page_is_a_valid_config() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        config = build(tomllib.loads(block), source="docs")
        assert config.run.root.startswith("s3://")


def test_the_page_names_every_capability() -> None:
    for field in dataclasses.fields(Capabilities):
        assert f"`{field.name}`" in PAGE
