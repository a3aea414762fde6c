#!/usr/bin/env bash
# Runs one config for every algorithm and seed, one after the other.
#
#   ALGORITHMS="bpo grpo rloo" SEEDS="0 1 2" bash launch/sweep.sh [--config.budget.updates=20] ...
#
#   ALGORITHMS  values of algorithm.name (default: bpo grpo rloo)
#   SEEDS       values of seed (default: 0 1 2)
#   CONFIG      the config file (default: configs/quickstart.py)
#   SWEEP       the folder that receives <algorithm>-seed<seed>/ (default: runs/sweep)
#
# Other arguments go to every run. A run that has a summary is not repeated, an interrupted one goes
# on. The sweep stops at the first run that fails.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=install.sh
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

CONFIG="${CONFIG:-$ROOT/configs/quickstart.py}"
SWEEP="${SWEEP:-$ROOT/runs/sweep}"
read -r -a algorithms <<<"${ALGORITHMS:-bpo grpo rloo}"
read -r -a seeds <<<"${SEEDS:-0 1 2}"

install ""
for algorithm in "${algorithms[@]}"; do
  for seed in "${seeds[@]}"; do
    workdir="$SWEEP/$algorithm-seed$seed"
    if grep -qsE '"status": *"(finished|budget)"' "$workdir/summary.json"; then
      echo "$workdir: done already"
      continue
    fi
    echo "$workdir"
    "$VENV/bin/python" -m bpo_jax.main --config="$CONFIG" --workdir="$workdir" \
      --config.algorithm.name="$algorithm" --config.seed="$seed" "$@"
  done
done
