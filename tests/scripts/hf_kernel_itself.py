"""pasa loaded through Hugging Face's `kernels` package from a local folder.

scripts/test_hf_kernel.sh runs this file by its name, with the newest `kernels` of the package index.
"""

import build_hf_kernel
import kernels
import pytest
import torch

import pasa


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    build_hf_kernel.build(folder)
    return folder


def test_a_local_kernel_attends(folder):
    """The repository's folder and the variant's load one module, and its outputs equal pasa's bit for bit."""
    kernel = kernels.get_local_kernel(folder)
    assert kernels.get_local_kernel(folder / "build" / "torch-universal") is kernel
    assert kernel.__name__ != "pasa"
    q = (torch.randn(1, 4, 30, 64) + 60).half()
    v = torch.randn(1, 4, 30, 64).half()
    out = kernel.attention(q, q, v, is_causal=True)
    assert out.isfinite().all()
    assert torch.equal(out, pasa.attention(q, q, v, is_causal=True))
    assert torch.equal(kernel.scaled_dot_product_attention(q, q, v), pasa.scaled_dot_product_attention(q, q, v))


def test_what_the_package_reads_of_it(folder):
    kernels.get_local_kernel(folder)
    (loaded,) = kernels.get_loaded_kernels()
    assert str(loaded.metadata.name) == "pasa"
    assert loaded.metadata.version == build_hf_kernel.VERSION
    assert loaded.metadata.license == "Apache-2.0"


def test_by_the_name_of_a_repository(folder, monkeypatch):
    """The package's variable LOCAL_KERNELS puts a folder in the place of a repository, so no network is needed."""
    monkeypatch.setenv("LOCAL_KERNELS", f"someone/pasa={folder}")
    kernel = kernels.get_kernel("someone/pasa", version=build_hf_kernel.VERSION)
    assert kernel.backends()[-1].available
