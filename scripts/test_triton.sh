#!/usr/bin/env bash
# With the oldest and the newest Triton that is known (--all: with each): all kernels compile for sm_80, 89, 90, 120 and,
# since 3.8, sm_100; direct launches give to the driver what Triton's own do; and the kernels are right in its
# interpreter, but for those of 3.7 and 3.8, which take the product of a compile-time number and a tensor for a
# compile-time number.
# No GPU is needed, and none is used: nothing here says that a version runs on a device. Each version is installed into a
# folder of its own and read in front of the environment's. Other arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
make_venv dev
cd "$ROOT"

versions="$("$VENV/bin/python" -c 'from pasa.ops.devices import TRITON_VERSIONS; print(*TRITON_VERSIONS)')"
if [[ "${1:-}" == --all ]]; then
  shift
else
  versions="${versions%% *} ${versions##* }"
fi
cores="$(env -u OMP_NUM_THREADS nproc)"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TRITON_DEFAULT_FP_FUSION=1  # as launches ask for (launcher.FUSED)
failed=0
for version in $versions; do
  folder="$(mktemp -d)"
  trap 'rm -rf "$folder"' EXIT
  # Alone: it needs nothing at run time, and pip must not bring another torch.
  "$VENV/bin/python" -m pip install --quiet --no-compile --no-deps --target "$folder/site" "triton==$version.*"
  export PYTHONPATH="$folder/site" TRITON_CACHE_DIR="$folder/cache"
  "$VENV/bin/python" -c 'import triton; print("triton", triton.__version__, "(compiled only)")'
  parts=()
  for ((i = 1; i <= cores; i++)); do
    "$VENV/bin/python" tests/ops/attention/triton/test_compiles_for_nvidia.py --part "$i/$cores" &
    parts+=($!)
  done
  for part in "${parts[@]}"; do
    wait "$part" || failed=1
  done
  interpreted="tests/ops/attention/triton/test_backend.py tests/ops/attention/triton/test_short.py"
  [[ $version == 3.[78] ]] && interpreted=
  "$VENV/bin/python" -m pytest -q -n "$cores" -o cache_dir="$folder/pytest" tests/ops/attention/triton/test_c_launcher.py \
    tests/ops/attention/triton/test_launcher.py tests/ops/attention/triton/test_hopper_launch.py \
    tests/ops/test_devices.py $interpreted "$@" || failed=1
  unset PYTHONPATH TRITON_CACHE_DIR
  rm -rf "$folder"
done
exit "$failed"
