#!/usr/bin/env bash
# The SGLang adapter against SGLang itself: registry, plugins, layers, pools and batches of the oldest tested version and
# the newest, or of those that are named. Installs the wheels alone (39 MB each), and what the tests import of the rest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
source "$(dirname "${BASH_SOURCE[0]}")/_servers.sh"
make_venv dev
cd "$ROOT"

PACKAGES=(IPython aiohappyeyeballs aiohttp aiosignal annotated_types anyio apache-tvm-ffi attrs compressed-tensors==0.17.0
  dill distro einops frozenlist gguf h11 httpcore httpx jiter loguru msgspec multidict openai opentelemetry-api orjson
  partial_json_parser prometheus_client propcache psutil pybase64 pydantic pydantic_core pyzmq sentencepiece setproctitle
  sniffio starlette tiktoken traitlets typing_inspection xgrammar yarl)
versions=("$@")
[[ ${#versions[@]} -gt 0 ]] || versions=(0.5.20 0.5.23)

packages="$VENV/sglang/packages-1"  # renamed when the list changes
install_alone "$packages" "${PACKAGES[@]}"
failed=()
for version in "${versions[@]}"; do
  folder="$VENV/sglang/$version"
  install_alone "$folder" --no-compile "sglang==$version"
  echo "SGLang $version"
  HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH="$folder:$packages" \
    "$VENV/bin/python" -m pytest -q tests/pasa/patching/sglang_itself.py || failed+=("$version")
done
[[ ${#failed[@]} -eq 0 ]] || { echo "failed with SGLang ${failed[*]}" >&2; exit 1; }
