#!/usr/bin/env bash
# transformers' own tests of its models, with PASA in the place of SDPA: those in the source distribution of the installed version.
# Arguments go to pytest, as in: -k TestLlama
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
make_venv dev
cd "$ROOT"

version="$("$VENV/bin/python" -c 'import transformers; print(transformers.__version__)')"
folder="$VENV/transformers/$version"
if [[ ! -e "$folder.done" ]]; then
  archives="$(mktemp -d)"
  trap 'rm -rf "$archives"' EXIT
  "$VENV/bin/python" -m pip download --quiet --no-deps --no-binary transformers -d "$archives" "transformers==$version"
  mkdir -p "$folder"
  tar -xzf "$archives"/*.tar.gz -C "$folder" --strip-components 1 "transformers-$version/tests"
  "$VENV/bin/python" -m pip install --quiet --no-compile --upgrade --target "$folder/packages" parameterized
  touch "$folder.done"
fi
cores="$(env -u OMP_NUM_THREADS nproc)"
PYTHONPATH="$folder/packages" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" -m tests.pasa.patching.transformers_itself \
  "$folder/tests" -n "$cores" "$@"
