#!/usr/bin/env bash
# The main job with its objects in a bucket: as tools/run.sh, on an S3 server (SeaweedFS) that the launcher starts on this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup.sh
exec .venv/bin/fsref run configs/s3-embedded.toml "$@"
