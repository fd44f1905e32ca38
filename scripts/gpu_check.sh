#!/usr/bin/env bash
# Every kernel on this machine's GPU, in under six minutes: right or wrong, and how fast. Uses the
# JAX that is there and installs nothing.
#   scripts/gpu_check.sh --help
#   scripts/gpu_check.sh --out_dir=out/gpu_check
# PYTHON=... names the interpreter that has JAX; python3 by default.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# -P: a folder called experiments where the caller stands is not meant.
exec "${PYTHON:-python3}" -P -m experiments.kernels.gpu_check "$@"
