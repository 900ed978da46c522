#!/usr/bin/env bash
# The vllm-ascend adapter against vllm-ascend itself: platform, backend, builder and layers of the tested versions, or of
# those that are named. Takes the Python files alone, of the registry's wheels (27 MB each) or sources, and those of the
# vLLM that each is for (300 to 430 MB). With PASA_RECORD=1 it records the interfaces that it sees.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
source "$(dirname "${BASH_SOURCE[0]}")/_servers.sh"
make_venv dev
cd "$ROOT"

PACKAGES=(jsonschema jsonschema_specifications mistral_common pycountry pydantic_extra_types referencing rpds-py)
versions=("$@")
[[ ${#versions[@]} -gt 0 ]] || versions=(0.18.0 0.23.0 0.23.0.post1)

install_alone "$VLLM_PACKAGES_FOLDER" "${VLLM_PACKAGES[@]}"
packages="$VENV/vllm-ascend/packages-1"  # renamed when the list changes
install_alone "$packages" "${PACKAGES[@]}"

twin="$(mktemp -d)"  # the kernels on the CPU twin, built by the first version's tests
trap 'rm -rf "$twin"' EXIT
failed=()
for version in "${versions[@]}"; do
  folder="$VENV/vllm-ascend/$version"
  vllm="$VENV/vllm/${version%.post*}"  # both have the same numbers
  python_files "$vllm" "vllm==${version%.post*}" --only-binary :all:
  if [[ $version == *.post* ]]; then  # sources alone, which pip opens by their setup.py
    install_alone "$VENV/vllm-ascend/setup-1" setuptools_scm vcs_versioning 'setuptools<81'
    SOC_VERSION=ascend910b1 PYTHONPATH="$VENV/vllm-ascend/setup-1" \
      python_files "$folder" "vllm-ascend==$version" --no-build-isolation --no-binary vllm-ascend
  else
    python_files "$folder" "vllm-ascend==$version" --only-binary :all: --python-version 3.11
  fi
  echo "vllm-ascend $version"
  HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TWIN_FOLDER="$twin" \
    PYTHONPATH="$folder:$vllm:$VLLM_PACKAGES_FOLDER:$packages" \
    "$VENV/bin/python" -m pytest -q tests/pasa/patching/vllm_ascend_itself.py || failed+=("$version")
done
[[ ${#failed[@]} -eq 0 ]] || { echo "failed with vllm-ascend ${failed[*]}" >&2; exit 1; }
