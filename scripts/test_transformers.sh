#!/usr/bin/env bash
# The patching tests with the oldest transformers that is supported and with the newest on the registry.
# Each is installed, with what it needs, into a folder of its own and read in front of the environment's. The newest also
# runs its server.
# Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
make_venv dev
cd "$ROOT"

oldest="$("$VENV/bin/python" -c 'from pasa.patching.versions import OLDEST; print(*OLDEST, sep=".")')"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
for requirement in "transformers==$oldest" "transformers[serving]"; do
  folder="$(mktemp -d)"
  trap 'rm -rf "$folder"' EXIT
  # pip warns of every package of the environment that wants other versions; the environment stays as it is.
  "$VENV/bin/python" -m pip install --quiet --no-compile --target "$folder" "$requirement" "numpy<2.4" 2>"$folder/pip.log" || {
    cat "$folder/pip.log" >&2
    exit 1
  }
  PYTHONPATH="$folder" "$VENV/bin/python" -c 'import transformers; print("transformers", transformers.__version__)'
  PYTHONPATH="$folder" "$VENV/bin/python" -m pytest -n "$(env -u OMP_NUM_THREADS nproc)" -p no:cacheprovider \
    tests/pasa/patching/test_transformers*.py tests/pasa/patching/test_copying.py tests/pasa/patching/test_removed.py \
    tests/pasa/patching/test_versions.py tests/pasa/patching/test_registration.py "$@"
  [[ "$requirement" != *serving* ]] || PYTHONPATH="$folder" "$VENV/bin/python" -m pytest -q -p no:cacheprovider \
    tests/pasa/patching/transformers_serve.py
  rm -rf "$folder"
done
