"""A missing package is named with its extra, before anything else happens."""

import subprocess
import sys

import pytest

from fsref.config import Config, ParallelSection, TrainerSection
from fsref.errors import ConfigError


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


def test_a_layout_that_is_not_data_parallel_is_for_trainers_of_ones_own() -> None:
    from fsref.trainer.main import main

    parallel = ParallelSection(data=1, context=2, layout="zigzag")
    with pytest.raises(ConfigError, match=r"fsref trainer is data parallel .* fsref\.loader"):
        main(Config(trainer=TrainerSection(parallel=parallel)))
