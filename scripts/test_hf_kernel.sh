#!/usr/bin/env bash
# pasa as a kernel of Hugging Face's `kernels` package, loaded through the newest version of that package on the registry.
# It has compiled parts and many dependencies, so it is installed into a folder of its own, read in front of the environment's.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
make_venv dev
cd "$ROOT"

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
# pip warns of every package of the environment that wants other versions; the environment stays as it is.
"$VENV/bin/python" -m pip install --quiet --no-compile --target "$folder" kernels 2>"$folder/pip.log" || {
  cat "$folder/pip.log" >&2
  exit 1
}
PYTHONPATH="$folder" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" -m pytest -q -p no:cacheprovider \
  tests/scripts/hf_kernel_itself.py "$@"
