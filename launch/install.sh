# Sourced by the other scripts: `install EXTRAS` makes a virtual environment and installs bpo_jax.
# shellcheck shell=bash
#
#   VENV     where the environment lives (default: .venv in the repository)
#   PYTHON   the interpreter it is made with (default: the first one found that is 3.11 or newer)
#
# Nothing happens when this setup.py is already installed there, so later starts cost no time.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13 python3.14; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
      >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "bpo_jax needs Python 3.11 or newer with its venv module; found:" \
    "$(python3 --version 2>&1 || true). Install one (Debian: apt-get install python3-venv)" \
    "or name it with PYTHON=/path/to/python3." >&2
  return 1
}

# install EXTRAS: "" for the program alone, or a comma-separated list of extras of setup.py.
install() {
  local extras="$1" python wanted stamp
  wanted="$ROOT $(cat "$ROOT/setup.py" "$ROOT/pyproject.toml" | cksum)"
  for stamp in "$VENV"/installed-*; do
    # Every set of extras contains the program itself.
    if [[ ("$extras" == "" || "$stamp" == "$VENV/installed-$extras") && -f "$stamp" ]] &&
      [[ "$(<"$stamp")" == "$wanted" ]]; then
      return
    fi
  done
  if [[ ! -x "$VENV/bin/pip" ]]; then
    python="$(find_python)"
    echo "Making a virtual environment in $VENV" >&2
    "$python" -m venv "$VENV"
  fi
  echo "Installing bpo_jax${extras:+ with $extras} (a few minutes the first time)" >&2
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable \
    "$ROOT${extras:+[$extras]}" >&2
  echo "$wanted" >"$VENV/installed-$extras"
}
