"""A package of the extra that is not installed is named, with the command that installs it."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("fsref.inference.main", "torch"),
        ("fsref.inference.main", "safetensors"),
        ("fsref.inference.main", "starlette"),
        ("fsref.inference.main", "uvicorn"),
        ("fsref.inference.model", "tokenizers"),
        ("fsref.inference.model", "transformers"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(module: str, package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from fsref.errors import MissingExtra\n"
        f"try:\n    import {module}\n"
        "except MissingExtra as e:\n    print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"{package!r}, which is not installed: pip install 'fsref[demo]'" in done.stdout
