#!/usr/bin/env bash
# The tests of what depends on torch's version (compiled models, torch's registry of attention, operators) with other
# versions than the environment's. Not part of test.sh --all: each version brings its CUDA libraries, 5 GB on disk.
# TORCH names the versions; arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
make_venv dev
cd "$ROOT"

export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
for version in ${TORCH:-2.11.0 2.12.1 2.14.1}; do
  folder="$(mktemp -d)"
  trap 'rm -rf "$folder"' EXIT
  # An environment of its own, read in front of ours: its NCCL and CUDA must be those that this torch was built with.
  "${PYTHON:-python3}" -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet --no-compile "torch==$version" 2>"$folder/pip.log" || {
    cat "$folder/pip.log" >&2
    exit 1
  }
  # The interpreter of some Triton versions fails on our kernels; scripts/test_triton.sh tests Triton.
  "$folder/bin/python" -m pip uninstall --quiet --yes triton
  site="$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  PYTHONPATH="$site" "$VENV/bin/python" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
  PYTHONPATH="$site" "$VENV/bin/python" -m pytest -n "$(env -u OMP_NUM_THREADS nproc)" -q -p no:cacheprovider \
    tests/pasa/patching tests/pasa/fp16/test_running.py tests/pasa/test_scaled_dot_product.py tests/pasa/test_watching.py \
    tests/ops/test_operators.py tests/ops/test_plans.py tests/ops/test_gradients.py "$@"
  rm -rf "$folder"
done
