#!/usr/bin/env python3
"""Write pasa's Python sources as a kernel of Hugging Face's `kernels` package.

The folder has the layout of a kernel repository: `build/torch-universal/`, with a `metadata.json`. It is loaded by
`kernels.get_local_kernel`. A kernel is imported under a name of its own, beside other versions and an installed pasa.
So imports become relative, and the operators get a namespace that is made from the contents.

    python scripts/build_hf_kernel.py build/hf_kernel
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENTRIES = ("attention", "config", "paged", "scaled_dot_product")
"""The files of pasa/ that the kernel offers; what they import comes too, and all of ops/."""
VERSION = 1
"""The kernel's version, which names its interface; it grows when a function changes or goes."""

INIT = '''"""FP16 attention that cannot overflow, as a kernel of the `kernels` package."""

from .attention import attention, attention_varlen, backends
from .config import PasaConfig
from .paged import attention_paged, write_pages
from .scaled_dot_product import scaled_dot_product_attention

__all__ = [
    "PasaConfig",
    "attention",
    "attention_paged",
    "attention_varlen",
    "backends",
    "scaled_dot_product_attention",
    "write_pages",
]
'''
CARD = """---
license: apache-2.0
tags:
- kernels
---

# pasa

FP16 attention that cannot overflow, in Triton and torch. Made by `scripts/build_hf_kernel.py` of the
repository of pasa.

```python
from pathlib import Path
from kernels import get_local_kernel

pasa = get_local_kernel(Path("{folder}"))
out = pasa.attention(q, k, v, is_causal=True)
```
"""
IMPORT = re.compile(r"^(\s*)from pasa((?:\.\w+)*) import ", re.MULTILINE)


def modules(entries: tuple[str, ...]) -> list[str]:
    """Return the files of pasa/ that entries import, themselves included, by name and in order."""
    reached, waiting = set(), list(entries)
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        text = (ROOT / "pasa" / f"{name}.py").read_text(encoding="utf-8")
        names = re.findall(r"^from pasa\.(\w+)", text, re.MULTILINE)
        for listed in re.findall(r"^from pasa import (.+)", text, re.MULTILINE):
            names += listed.split(", ")
        waiting += [each for each in names if (ROOT / "pasa" / f"{each}.py").is_file()]
    return sorted(reached)


def sources() -> dict[str, str]:
    """Return the text of each file of the kernel by its path, unchanged."""
    files = {f"{name}.py": ROOT / "pasa" / f"{name}.py" for name in modules(ENTRIES)}
    files |= {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "ops").rglob("*.py"))}
    return {name: path.read_text(encoding="utf-8") for name, path in files.items()}


def relocated(name: str, text: str, namespace: str) -> str:
    """Return a file that works below any package name, with its operators in a namespace.

    Raises
    ------
    ValueError
        The file names the package in a way that is not rewritten here.
    """
    dots = "." * len(Path(name).parts)
    text = IMPORT.sub(lambda match: f"{match[1]}from {dots}{match[2].removeprefix('.')} import ", text)
    text = re.sub(r'"pasa\.ops\.([\w.]+)"', r'__name__.partition(".")[0] + ".ops.\1"', text)
    text = text.replace('"pasa::', f'"{namespace}::').replace(
        '("pasa", "torch")', '(__name__.partition(".")[0], "torch")'
    )
    if "ascend" not in name:  # there it is the namespace of the library in C++
        text = re.sub(r"(?<!`)torch\.ops\.pasa\.", f"torch.ops.{namespace}.", text)
    left = re.findall(r"^\s*(?:import pasa\b|from pasa\b).*", text, re.MULTILINE)
    if left:
        raise ValueError(f"{name}: {left[0].strip()!r} is not rewritten: write it as 'from pasa.MODULE import NAME'")
    return text


def build(folder: Path) -> Path:
    """Write the kernel, in place of an earlier one, and return the folder of its only variant."""
    files = sources()
    contents = json.dumps([INIT, files], sort_keys=True).encode()
    namespace = f"_pasa_{hashlib.sha256(contents).hexdigest()[:12]}"
    variant = folder / "build" / "torch-universal"
    if variant.exists():
        shutil.rmtree(variant)
    for name, text in {"__init__.py": INIT, **files}.items():
        path = variant / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(relocated(name, text, namespace), encoding="utf-8")
    metadata = {
        "id": namespace,
        "name": "pasa",
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(CARD.format(folder=folder), encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", folder / "LICENSE")
    return variant


def main(arguments: list[str]) -> int:
    """Build into the folder that is named, or into build/hf_kernel of the repository."""
    if len(arguments) > 1 or arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return len(arguments) > 1
    print(build(Path(arguments[0] if arguments else ROOT / "build" / "hf_kernel")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
