"""A missing package is named with its extra, before anything else happens."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("package", "module", "said"),
    [
        ("torch", "fsref.trainer", "'torch', which is not installed: pip install 'fsref[torch]'"),
        ("transformers", "fsref.trainer.main", "'transformers', which is not installed: pip install 'fsref[demo]'"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(package: str, module: str, said: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"MissingExtra: this needs the package {said}" in done.stderr
