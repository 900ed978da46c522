#!/usr/bin/env bash
# From a bare machine to the two results: the RMSE table, and a language model rescued from FP16 overflow.
# Arguments go to `pasa bench rmse`, in place of --heads 4 (the paper has 16).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
make_venv eval

(($#)) || set -- --heads 4
status=0
"$VENV/bin/pasa" bench rmse "$@" || status=$? # 1: a gate failed; the demonstration is shown all the same
"$VENV/bin/pasa" demo || status=$?
exit "$status"
