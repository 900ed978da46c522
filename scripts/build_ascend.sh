#!/usr/bin/env bash
# Builds the Ascend C kernels where CANN and torch_npu are installed, and puts the library where pasa looks for it.
# `pasa build-ascend` calls it for the Python that runs pasa. PYTHON names the interpreter that has pasa, torch and
# torch_npu; PASA_ASCEND_LIBRARY another place for the library; BUILD another folder to build in. Arguments go to cmake,
# such as -DCMAKE_BUILD_TYPE=Debug. Not yet run on an NPU box.
# SOC_VERSION names the chip to build for, such as Ascend910B3 or Ascend310P3; without it that of this machine counts.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
BUILD="${BUILD:-$ROOT/build/ascend_c}"
LEAST_CANN=9.1 # 9.0 has neither ReduceRepeat nor SetSaturationFlag, nor have the first two betas of 9.1

stop() {
  echo "build_ascend.sh: $1" >&2
  exit 1
}

# Prints the compiler's name of a chip's architecture.
architecture() {
  case "${1,,}" in
    ascend910b*) echo dav-2201 ;;
    ascend310p*) echo dav-2002 ;;
    *) return 1 ;;
  esac
}

soc="${SOC_VERSION:-}"
[[ -z "$soc" ]] || architecture "$soc" >/dev/null ||
  stop "no kernel was written for SOC_VERSION=$soc, only for Ascend910B1 to B4 and Ascend310P; 'pasa doctor' says what serves it"
[[ -n "${ASCEND_HOME_PATH:-}" ]] ||
  stop "ASCEND_HOME_PATH is not set; source CANN's set_env.sh first, such as: source /usr/local/Ascend/cann/set_env.sh"
[[ -d "$ASCEND_HOME_PATH" ]] || stop "ASCEND_HOME_PATH=$ASCEND_HOME_PATH is not a folder"
command -v cmake >/dev/null || stop "cmake is not installed"
[[ -n "$(command -v "$PYTHON")" ]] || stop "PYTHON=$PYTHON is not a program"
PYTHON="$(realpath -s "$(command -v "$PYTHON")")"

ask() ( # in a folder without modules of its own: the repository's pasa/ is not the whole package
  cd / && "$PYTHON" -c "$1"
)
for module in pasa torch torch_npu; do
  ask "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)" ||
    stop "$module is not installed for PYTHON=$PYTHON"
done


cann="$(ask 'from pasa.ops.attention.ascend import build_record; print(build_record.cann_version() or "")')"
if [[ -n "$cann" && "$(printf '%s\n' "$LEAST_CANN" "$cann" | sort -V | head -n 1)" != "$LEAST_CANN" ]]; then
  stop "CANN $cann has no ReduceRepeat and no SetSaturationFlag, which the kernels call; install CANN $LEAST_CANN or newer"
fi
soc="${soc:-$(ask 'from pasa.ops import devices; print(devices.npu_chip())')}"
arch="$(architecture "${soc:-Ascend910B}")" || stop "no kernel was written for this chip, '$soc'; 'pasa doctor' says what serves it"
record="$(ask 'from pasa.ops.attention.ascend import build_record; print(build_record.record())') arch=$arch"
library="$(ask 'from pasa.ops import envs; print(envs.ascend_library())')"
cmake -S "$ROOT/ascend_c" -B "$BUILD" -DPython3_EXECUTABLE="$PYTHON" -DCMAKE_ASC_ARCHITECTURES="$arch" \
  -DPASA_BUILD_RECORD="$record" "$@"
cmake --build "$BUILD" --parallel
install -D "$BUILD/libpasa_npu.so" "$library.new"
mv "$library.new" "$library" # in one step: whoever loads it finds it whole
echo "built $library for $record; 'pasa doctor' shows whether it loads"
