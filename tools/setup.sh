#!/usr/bin/env bash
# Makes .venv beside the sources, once, and installs the package with what its tests need. PYTHON picks the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ ! -x .venv/bin/fsref ]; then
  "${PYTHON:-python3}" -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else f"fsref needs Python 3.11 to 3.13, this is {v[0]}.{v[1]}")'
  echo 'installing into .venv, once: a few minutes' >&2
  "${PYTHON:-python3}" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo,pool,test]'
fi
[ fsref/objects/_kernels.so -nt fsref/objects/kernels.c ] || .venv/bin/python tools/build_kernels.py || true # without a C compiler numcodecs decodes
