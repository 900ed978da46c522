#!/usr/bin/env bash
# The vLLM adapter against vLLM itself, classes and engines: the oldest version, those on both sides of the change of the
# cache, and the newest, or those that are named. Takes their Python files alone from the registry's wheels (300 to
# 430 MB each), and what these import. With PASA_RECORD=1 it records the interfaces that it sees.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
make_venv dev
cd "$ROOT"

PACKAGES=(aiohappyeyeballs aiohttp aiosignal annotated_types anthropic anyio apache-tvm-ffi astor attrs blake3 cachetools
  cbor2 cloudpickle compressed-tensors==0.17.0 depyf==0.20.0 diskcache distro docstring_parser einops fastapi frozenlist
  gguf h11 httpcore httpx ijson jiter lark==1.2.2 llguidance==1.7.0 llvmlite==0.47.0 loguru msgpack msgspec multidict
  numba==0.65.0 openai openai_harmony opentelemetry-api opentelemetry-sdk oss-harmony partial_json_parser
  prometheus-fastapi-instrumentator prometheus_client propcache protobuf psutil py-cpuinfo pybase64 pydantic pydantic_core
  python-json-logger pyzmq sentencepiece setproctitle sniffio starlette tiktoken typing_inspection uvicorn uvloop
  watchfiles xgrammar yarl)
versions=("$@")
[[ ${#versions[@]} -gt 0 ]] || versions=(0.18.0 0.28.0 0.29.0 0.33.0)

packages="$VENV/vllm/packages-2"  # renamed when the list changes
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
  # In two processes: an engine changes what a process knows of vLLM's platform.
  for tests in vllm_itself vllm_engine; do
    HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH="$folder:$packages" \
      "$VENV/bin/python" -m pytest -q "tests/pasa/patching/$tests.py" || failed+=("$version ($tests)")
  done
done
[[ ${#failed[@]} -eq 0 ]] || { echo "failed with vLLM ${failed[*]}" >&2; exit 1; }
