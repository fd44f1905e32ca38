#!/usr/bin/env bash
# Lint, types, layers, tests, in this order; stops at the first that fails, with its exit code.
# About ten minutes on two cores the first time, less when what JAX compiled is kept.
#   scripts/test.sh                          all tests but those that are marked slow
#   scripts/test.sh -m slow                  the slow ones; -m '' for all
#   scripts/test.sh tests/test_x.py -k name  the same checks, with these arguments for pytest
#   JAX_PLATFORMS=cuda scripts/test.sh       the tests on a GPU instead of the CPU
#   EXTRAS=aot scripts/test.sh               also what compiles kernels for GPUs that are not here
set -euo pipefail
# shellcheck source=scripts/_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
extras="test${EXTRAS:+,$EXTRAS}"
[[ $JAX_PLATFORMS == *cuda* && $extras != *cuda* ]] && extras="$extras,cuda12"
ensure_environment "$extras"
cd "$root"

step() {
  say "== $*"
  "$@"
}

step ruff check .
step ruff format --check .
step mypy
step lint-imports
# More processes than that take memory and little time off.
step pytest -n auto --maxprocesses=4 "$@"
