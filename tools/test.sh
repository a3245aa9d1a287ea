#!/usr/bin/env bash
# Lint, format, types, the import contract and the tests: installs on the first call. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup.sh
exec .venv/bin/python tools/check.py "$@"
