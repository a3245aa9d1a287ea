#!/usr/bin/env bash
# The main job on the embedded default: installs on the first call, then runs the whole pipeline on this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup.sh
exec .venv/bin/fsref run configs/local.toml "$@"
