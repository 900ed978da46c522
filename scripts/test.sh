#!/usr/bin/env bash
# Lint, types, lowering for an NPU, tests. Arguments go to pytest; --all, which comes first, adds the long sections at
# the end.
set -euo pipefail
ALL=
if [[ "${1:-}" == --all ]]; then
  ALL=1
  shift
fi
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
source "$ROOT/scripts/_browser.sh"
need_browser
make_venv dev
cd "$ROOT"

"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .

# mypy cannot see that pasa.ops is ops/ and pasa.eval is eval/: show it a folder where that is so. It ends while the
# tests run.
tree="$(mktemp -d)"
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/pasa"
ln -s "$ROOT"/pasa/* "$ROOT/ops" "$ROOT/eval" "$tree/pasa/"
(cd "$tree" && MYPYPATH="$ROOT/docs:$ROOT/docs/assets:$ROOT/scripts" exec "$VENV/bin/mypy" \
  --config-file "$ROOT/pyproject.toml" --cache-dir "$ROOT/.mypy_cache" \
  -p pasa -m generate -m hooks -m draw_rescue -m pasa_cli -m build_hf_kernel) &
types=$!

# Every kernel still lowers for an NPU, and the table in ops/attention/README.md says so.
"$VENV/bin/python" scripts/lower_triton_ascend.py --check

# One thread for each of pytest's processes: together they then use the cores once. nproc heeds OMP_NUM_THREADS.
cores="$(env -u OMP_NUM_THREADS nproc)"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
[[ $ALL ]] && export PASA_ALL_MUTANTS=1 PASA_ALL_BATCHES=1
# Each takes half of the tests in order, so that models are loaded and programs compiled in one of them, then what is
# left.
failed=0
"$VENV/bin/python" -m pytest -n "$cores" --dist worksteal "$@" || failed=$?

# Faults planted in copies of the sources: each has to make a test fail. Seven of them here, every one with --all.
if [[ $ALL ]]; then
  "$VENV/bin/python" -m tests.mutants.run || failed=1
  bash scripts/test_triton.sh || failed=1
  bash scripts/test_transformers.sh || failed=1
  bash scripts/test_transformers_suite.sh || failed=1
  bash scripts/test_vllm.sh || failed=1
  bash scripts/test_vllm_ascend.sh || failed=1
  bash scripts/test_hf_kernel.sh || failed=1
  "$VENV/bin/pasa" eval zoo --jobs "$cores" || failed=1
elif (($# == 0)); then
  "$VENV/bin/python" -m tests.mutants.run --sample || failed=1
fi
wait "$types"
exit "$failed"
