#!/usr/bin/env bash
# Runs the tests, installation included.
#
#   bash launch/test.sh                          everything but the slow ones
#   bash launch/test.sh -m slow                  the slow ones
#   bash launch/test.sh tests/test_package.py    some of them
#
# Arguments are pytest's. EXTRAS=dev,textworld installs the original game engine as well, whose
# comparison is skipped otherwise; EXTRAS=dev,parity does the same for PyTorch.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=install.sh
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

install "${EXTRAS:-dev}"
cd "$ROOT"
# A file stays on one worker, so what it compiled is compiled once.
exec "$VENV/bin/python" -m pytest -n auto --maxprocesses=4 --dist=loadfile "$@"
