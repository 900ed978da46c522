"""The folder for Hugging Face's `kernels` package: its layout, and that it works beside an installed pasa.

The package itself is not in the environment, because it has compiled parts and many dependencies.
`scripts/test_hf_kernel.sh` installs it and runs `hf_kernel_itself.py`, which loads the folder through it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import build_hf_kernel
import pytest

ROOT = Path(__file__).resolve().parents[2]
# Import a file under the kernel's name, as Python's import system loads any package from its __init__.py.
LOAD = """
import importlib.util, json, os, sys
import torch, pasa
variant = sys.argv[1]
name = json.load(open(os.path.join(variant, "metadata.json")))["id"]
spec = importlib.util.spec_from_file_location(name, os.path.join(variant, "__init__.py"))
kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
"""
BESIDE_PASA = """
q = (torch.randn(1, 2, 20, 32) + 60).half().requires_grad_()
v = torch.randn(1, 2, 20, 32).half()
for backend in (None, "triton"):
    ours, theirs = (each.attention(q, q, v, is_causal=True, backend=backend) for each in (pasa, kernel))
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(out.sum(), q)[0] for out in (ours, theirs)))
assert kernel.attention is not pasa.attention
assert kernel.attention.__module__ == f"{name}.attention"
assert torch.equal(kernel.scaled_dot_product_attention(q, q, v), pasa.scaled_dot_product_attention(q, q, v))
assert [each.name for each in kernel.backends()] == [each.name for each in pasa.backends()]
starts = torch.tensor([0, 5, 20], dtype=torch.int32)
packed = [x[0].transpose(0, 1) for x in (q, q, v)]
assert kernel.attention_varlen(*packed, starts, starts, 15, 15).isfinite().all()
mine = [each for each in sys.modules if each.startswith(name)]
assert not [each for each in mine if "pasa.ops" in (getattr(sys.modules[each], "__file__", "") or "")]
print("served")
"""


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    return build_hf_kernel.build(tmp_path_factory.mktemp("kernel"))


def test_layout(variant):
    assert variant.parts[-2:] == ("build", "torch-universal")
    metadata = json.loads((variant / "metadata.json").read_text())
    assert re.fullmatch(r"_pasa_[0-9a-f]{12}", metadata["id"])
    assert (metadata["name"], metadata["license"], metadata["version"]) == ("pasa", "Apache-2.0", 1)
    assert (variant / "ops" / "attention" / "triton" / "prefill" / "kernel.py").is_file()
    assert not [path for path in variant.rglob("*") if "patching" in path.name or "eval" in path.name]
    repository = variant.parents[1]
    assert sorted(path.name for path in repository.iterdir()) == ["LICENSE", "README.md", "build"]


def test_nothing_names_the_installed_package(variant):
    """Imports are relative, and operators are in the kernel's own namespace."""
    for path in variant.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r'^\s*(from|import) pasa\b|"pasa::|"pasa\.ops', text, re.MULTILINE), path


def test_it_serves_beside_an_installed_pasa(variant, tmp_path):
    """Both in one process: the same bits, the reference and the interpreted Triton kernels, and gradients."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD + BESIDE_PASA, str(variant)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.stdout == "served\n", done.stderr[-2000:]


def test_the_name_follows_the_contents(variant, tmp_path, monkeypatch):
    """Two versions can be loaded in one process, because each has its own name; the same contents have the same."""

    def name(folder):
        return json.loads((build_hf_kernel.build(folder) / "metadata.json").read_text())["id"]

    first = name(tmp_path)
    assert first == name(tmp_path) == json.loads((variant / "metadata.json").read_text())["id"]
    monkeypatch.setattr(build_hf_kernel, "INIT", build_hf_kernel.INIT + "# another\n")
    assert name(tmp_path) != first


def test_an_import_that_is_not_rewritten_is_refused():
    with pytest.raises(ValueError, match=r"attention.py: 'import pasa' is not rewritten: write it as"):
        build_hf_kernel.relocated("attention.py", "import torch\nimport pasa\n", "n")


def test_command_line(tmp_path, capsys):
    assert build_hf_kernel.main([str(tmp_path / "k")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "k" / "build" / "torch-universal")
    assert build_hf_kernel.main(["--help"]) == 0
    assert build_hf_kernel.main(["a", "b"]) == 1


def test_the_package_itself_is_tested_by_the_long_suite():
    assert "test_hf_kernel.sh" in (ROOT / "scripts" / "test.sh").read_text("utf-8")
    assert "hf_kernel_itself.py" in (ROOT / "scripts" / "test_hf_kernel.sh").read_text("utf-8")
