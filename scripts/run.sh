#!/usr/bin/env bash
# Serve a workload with the main experiment, installing what it needs on the first run.
#   scripts/run.sh --help
#   scripts/run.sh --workload=sharegpt --num_requests=64 --out_dir=out/serve
# PYTHON=... names the interpreter to install with, where the right one is not found by itself.
set -euo pipefail
# shellcheck source=scripts/_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

extras=""
has_gpu && extras="cuda12"
ensure_environment "$extras"
# -P: a folder called experiments where the caller stands is not meant.
exec "$venv/bin/python" -P -m experiments.serve "$@"
