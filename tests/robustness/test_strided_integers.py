"""Story: the Triton kernels read tables, lengths and slots one after another, whatever the strides of the tensors they
were given. With every other entry of a longer tensor, a column of a table or the transpose of one, keys came from pages
of other sequences, tokens went to slots of others, and cumulative lengths were read from behind the tensor: wrong
numbers, and memory overwritten, where the reference was right."""

import pytest
import torch

import pasa
from pasa.ops.attention.triton.paged import launch as paged_write_launch
from tests.inputs import DEVICE
from tests.pages import make_pages


def spaced(x):
    """The same numbers, with others in between."""
    return torch.stack([x, torch.full_like(x, 1)], -1)[..., 0]


def transposed(x):
    """The same numbers, columns first: a change of type keeps the strides."""
    return x.mT.contiguous().mT if x.dim() == 2 else spaced(x)


@pytest.mark.parametrize("name", ["table", "lengths", "cu_q"])
@pytest.mark.parametrize("lay_out", [spaced, transposed])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_decoding(name, lay_out, kind):
    pages = make_pages([40, 17, 33], (2, 1), 16, queries=[2, 1, 3] if name == "cu_q" else None, bias=30)
    expected = pages.attend(DEVICE, backend="triton")
    strided = pages._replace(**{name: lay_out(getattr(pages, name).to(kind))})
    assert not getattr(strided, name).is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(strided.attend(DEVICE, backend="triton"), expected, strict=True))


def test_writing():
    pages = make_pages([20, 7], (1, 1), 16).to(DEVICE)
    caches = torch.zeros(2, *pages.k_cache.shape, dtype=torch.float16, device=DEVICE)
    anchors = torch.zeros(pages.k_cache.shape[0], 1, 16, device=DEVICE).half()
    slots = pages._replace(table=pages.table.cpu()).slots.to(DEVICE)
    paged_write_launch.write_pages(pages.k, pages.v, *caches, spaced(slots), anchors)
    assert torch.equal(caches[0].reshape(-1, 1, 16)[slots], pages.k)
    assert int(caches.count_nonzero()) == int(pages.k.count_nonzero() + pages.v.count_nonzero())


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_packed_sequences(name):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(50, 1, 16, generator=g).half().to(DEVICE) for _ in range(3))
    edges = torch.tensor([0, 20, 50], dtype=torch.int32, device=DEVICE)
    call = {"cu_seqlens_q": edges, "cu_seqlens_k": edges, "max_seqlen_q": 30, "max_seqlen_k": 30, "backend": "triton"}
    expected = pasa.attention_varlen(q, k, v, **call)
    behind = torch.stack([edges, edges], -1)[..., 0]  # reads a length twice, but none that no tensor has
    assert torch.equal(pasa.attention_varlen(q, k, v, **call | {name: behind}), expected)
