"""docs/configuration.md is made from the code."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_configuration_page_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools/config_docs.py"), "--check"], check=False)
    assert done.returncode == 0, "run: python tools/config_docs.py"
