#!/usr/bin/env bash
# From a bare machine to the two results: the RMSE table, and a language model rescued from FP16 overflow.
# Arguments go to `pasa bench rmse`, in place of --heads 4 (the paper has 16).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
echo "1/3 installs torch and pasa into $VENV, unless it is up to date"
make_venv eval

(($#)) || set -- --heads 4
status=0
echo "2/3 pasa bench rmse $*"
"$VENV/bin/pasa" bench rmse "$@" || status=$? # 1: a gate failed; the demonstration is shown all the same
echo "3/3 pasa demo"
"$VENV/bin/pasa" demo || status=$?
((status == 0)) || echo "FAILED with exit status $status: read the first line below 2/3 or 3/3."
exit "$status"
