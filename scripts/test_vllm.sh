#!/usr/bin/env bash
# The vLLM adapter against vLLM itself: the oldest and the newest version of each interface, or those that are named.
# Takes their Python files alone from the registry's wheels (300 MB each), and what these import.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
make_venv dev
cd "$ROOT"

PACKAGES=(aiohappyeyeballs aiohttp aiosignal annotated_types attrs blake3 cachetools cbor2 cloudpickle einops frozenlist
  msgspec multidict openai openai_harmony partial_json_parser prometheus_client propcache psutil pybase64 pydantic
  pydantic_core python-json-logger pyzmq setproctitle typing_inspection yarl)
versions=("$@")
[[ ${#versions[@]} -gt 0 ]] || versions=(0.14.0 0.28.0 0.29.0 0.30.0 0.31.0 0.33.0)

packages="$VENV/vllm/packages"
if [[ ! -e "$packages.done" ]]; then
  "$VENV/bin/python" -m pip install --quiet --upgrade --target "$packages" --no-deps "${PACKAGES[@]}"
  touch "$packages.done"
fi
failed=()
for version in "${versions[@]}"; do
  folder="$VENV/vllm/$version"
  if [[ ! -e "$folder.done" ]]; then
    wheels="$(mktemp -d)"
    "$VENV/bin/python" -m pip download --quiet --no-deps --no-cache-dir --only-binary :all: -d "$wheels" "vllm==$version"
    "$VENV/bin/python" - "$wheels" "$folder" <<'EOF'
import sys, zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).iterdir()
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(sys.argv[2], [name for name in archive.namelist() if name.endswith((".py", "METADATA"))])
EOF
    rm -r "$wheels"
    touch "$folder.done"
  fi
  echo "vLLM $version"
  OMP_NUM_THREADS=1 PYTHONPATH="$folder:$packages" "$VENV/bin/python" -m pytest -q tests/pasa/patching/vllm_itself.py ||
    failed+=("$version")
done
[[ ${#failed[@]} -eq 0 ]] || { echo "failed with vLLM ${failed[*]}" >&2; exit 1; }
