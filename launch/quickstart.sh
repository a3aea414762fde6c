#!/usr/bin/env bash
# Trains the small policy on generated household games, installation included.
#
#   bash launch/quickstart.sh [--workdir=DIR] [--config.seed=1] [--config.algorithm.name=grpo] ...
#
# Arguments are those of `python -m bpo_jax.main`; the default workdir is runs/quickstart. The same
# command goes on where an interrupted run stopped.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=install.sh
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

install ""
# Of a flag given twice the last one counts, so the caller's come last.
exec "$VENV/bin/python" -m bpo_jax.main --config="$ROOT/configs/quickstart.py" \
  --workdir="$ROOT/runs/quickstart" "$@"
