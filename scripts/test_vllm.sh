#!/usr/bin/env bash
# The vLLM adapter against vLLM itself, classes and engines: the oldest version, those on both sides of the change of the
# cache, and the newest, or those that are named. Takes their Python files alone from the registry's wheels (300 to
# 430 MB each), and what these import. With PASA_RECORD=1 it records the interfaces that it sees.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
source "$(dirname "${BASH_SOURCE[0]}")/_servers.sh"
make_venv dev
cd "$ROOT"

versions=("$@")
[[ ${#versions[@]} -gt 0 ]] || versions=(0.18.0 0.28.0 0.29.0 0.33.0)

install_alone "$VLLM_PACKAGES_FOLDER" "${VLLM_PACKAGES[@]}"
failed=()
for version in "${versions[@]}"; do
  folder="$VENV/vllm/$version"
  python_files "$folder" "vllm==$version" --only-binary :all:
  echo "vLLM $version"
  # In two processes: an engine changes what a process knows of vLLM's platform.
  for tests in vllm_itself vllm_engine; do
    HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH="$folder:$VLLM_PACKAGES_FOLDER" \
      "$VENV/bin/python" -m pytest -q "tests/pasa/patching/$tests.py" || failed+=("$version ($tests)")
  done
done
[[ ${#failed[@]} -eq 0 ]] || { echo "failed with vLLM ${failed[*]}" >&2; exit 1; }
