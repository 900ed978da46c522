# Sourced by the scripts that test adapters against the servers that they are for. It fetches Python files from the
# registry into $VENV, because the servers' wheels bring CUDA libraries or need an NPU.

# What vLLM imports, beside what the tests need. The folder is renamed when the list changes.
VLLM_PACKAGES_FOLDER="$VENV/vllm/packages-2"
VLLM_PACKAGES=(aiohappyeyeballs aiohttp aiosignal annotated_types anthropic anyio apache-tvm-ffi astor attrs blake3 cachetools
  cbor2 cloudpickle compressed-tensors==0.17.0 depyf==0.20.0 diskcache distro docstring_parser einops fastapi frozenlist
  gguf h11 httpcore httpx ijson jiter lark==1.2.2 llguidance==1.7.0 llvmlite==0.47.0 loguru msgpack msgspec multidict
  numba==0.65.0 openai openai_harmony opentelemetry-api opentelemetry-sdk oss-harmony partial_json_parser
  prometheus-fastapi-instrumentator prometheus_client propcache protobuf psutil py-cpuinfo pybase64 pydantic pydantic_core
  python-json-logger pyzmq sentencepiece setproctitle sniffio starlette tiktoken typing_inspection uvicorn uvloop
  watchfiles xgrammar yarl)

install_alone() { # FOLDER PACKAGE...: these packages, without what they require
  local folder="$1"
  [[ -e "$folder.done" ]] && return
  "$VENV/bin/python" -m pip install --quiet --upgrade --target "$folder" --no-deps "${@:2}"
  touch "$folder.done"
}

python_files() { # FOLDER REQUIREMENT [pip's arguments]: the Python files of a package, of its wheel or its sources
  local folder="$1" download
  [[ -e "$folder.done" ]] && return
  download="$(mktemp -d)"
  "$VENV/bin/python" -m pip download --quiet --no-deps --no-cache-dir -d "$download" "${@:3}" "$2"
  "$VENV/bin/python" - "$download" "$folder" <<'PYTHON'
import re, sys, tarfile, zipfile
from pathlib import Path, PurePosixPath

(file,) = Path(sys.argv[1]).iterdir()
package = file.name.split("-")[0]
if file.suffix == ".whl":
    archive = zipfile.ZipFile(file)
    members = {name: name for name in archive.namelist()}
    read = archive.read
else:  # sources are in a folder of the version, beside tests and tools
    archive = tarfile.open(file)
    members = {"/".join(PurePosixPath(member.name).parts[1:]): member for member in archive if member.isfile()}
    read = lambda member: archive.extractfile(member).read()
for name, member in members.items():
    owner = re.split(r"[-.]", PurePosixPath(name).parts[0])[0]  # of its folder, or of that of its metadata
    if owner == package and name.endswith((".py", "METADATA", "PKG-INFO", "entry_points.txt")):
        path = Path(sys.argv[2], name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read(member))
PYTHON
  rm -r "$download"
  touch "$folder.done"
}
