"""The launches of the Hopper kernels fit the kernels, as far as that shows without a GPU."""

import pytest
import torch

import pasa
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.attention.triton import backend
from pasa.ops.attention.triton.hopper import launch
from pasa.ops.attention.triton.kernel_call import KernelCall
from pasa.ops.attention.triton.tiles import hopper_pad

KERNELS = launch.centre_kernel, launch.plain_kernel, launch.anchor_kernel, launch.exact_kernel
SIZES = {"q": (2, 4, 300), "k": (2, 2, 400)}  # batch, heads, tokens


@pytest.fixture
def plan(monkeypatch, request):
    causal, dim = request.param
    monkeypatch.setattr(launch, "processors", lambda _: 132)
    q, k, v = (torch.zeros(*SIZES[name], dim, dtype=torch.float16) for name in "qkk")
    return launch.Plan(q.shape, k.shape, [list(x.stride()) for x in (q, k, v)], causal, 0, torch.device("cpu")), q, k, v


ALL = pytest.mark.parametrize(
    "plan",
    [(causal, dim) for causal in (False, True) for dim in (32, 40, 64, 72, 80, 128, 136, 192, 256)],
    indirect=True,
)


@ALL
def test_every_launch_has_the_arguments_of_its_kernel(plan):
    """Pointers and tensor maps stand where the kernel's parameters do, and no parameter is left out."""
    held, q, k, v = plan
    parts = held._views(q.new_empty(held.bytes // 2))
    maps = held._descriptors(q, k, parts[-1], v, q)
    calls = held._calls(k, v, torch.zeros(held.lse_shape), parts, maps, 0.1)
    for kernel, (programs, arguments) in zip(KERNELS, calls, strict=True):
        assert programs > 0
        named = dict(zip(kernel.arg_names, arguments, strict=True))
        for name, argument in named.items():
            assert isinstance(argument, torch.Tensor) == name.startswith("p_"), (kernel.__name__, name)
            assert isinstance(argument, launch.TensorDescriptor) == name.endswith("_desc"), (kernel.__name__, name)


@ALL
def test_parts_of_the_buffer_do_not_overlap(plan):
    """Tensor maps need addresses at multiples of 16 bytes, and no part may reach into the next."""
    held, q, *_ = plan
    buffer = q.new_empty(held.bytes // 2)
    parts = held._views(buffer)
    ends = [x.data_ptr() + x.nbytes for x in parts]
    assert all(end <= after.data_ptr() for end, after in zip(ends, parts[1:], strict=False))
    assert ends[-1] <= buffer.data_ptr() + buffer.nbytes
    assert all((x.data_ptr() - buffer.data_ptr()) % 16 == 0 for x in parts)


def test_centred_keys_are_counted_as_the_kernel_reads_them():
    """The kernels read the longest keys of parts of TILE elements, as many as `centre_kernel` has programs."""
    for keys, dim in (
        (1, 64),
        (127, 64),
        (129, 64),
        (64, 128),
        (65, 128),
        (65, 72),
        (128, 40),
        (129, 32),
        (33, 256),
        (65, 136),
    ):
        part = launch.CENTRE_TILE.value // hopper_pad(dim)
        k = torch.zeros(1, 1, keys, dim, dtype=torch.float16)
        held = launch.Plan(k.shape, k.shape, [list(k.stride())] * 3, True, 0, torch.device("cpu"))
        assert held.centre[0] == -(-keys // part)


@pytest.mark.parametrize("dim", [8, 24, 32, 40, 44, 56, 64, 72, 80, 84, 96, 112, 120, 128, 136, 164, 192, 256, 264])
def test_head_dims_that_tma_can_pad_are_served(monkeypatch, dim):
    """Heads of 32 to 256, in steps of 8, take tiles of 64 to 256 columns, so their rows are multiples of 16 bytes."""
    monkeypatch.setattr(backend, "_is_hopper", lambda device: True)
    q = torch.zeros(1, 2, 300, dim, dtype=torch.float16)
    assert backend.hopper_serves(KernelCall(q, q, q, 1.0)) == (dim % 8 == 0 and 32 <= dim <= 256)


@ALL
def test_boxes_of_tensor_maps_are_as_wide_as_tiles(plan):
    """Tiles of a head of 72 have 128 columns, of which TMA reads 72 and writes 72."""
    held, q, k, v = plan
    maps = held._descriptors(q, k, k, v, q)
    assert {desc.block_shape[3] for (desc,) in maps} == {hopper_pad(q.shape[3])}
    assert {desc.shape[3] for (desc,) in maps} == {q.shape[3]}
    assert all(step % 8 == 0 for (desc,) in maps for step in desc.strides[:3])


def strange_strides():
    """Return tensors (2, 2, 300, 72) that a tensor map cannot describe, by what is wrong with them."""
    plain = torch.randn(2, 2, 300, 72, generator=torch.Generator().manual_seed(0)).half()
    wide = torch.zeros(2, 2, 300, 76, dtype=torch.float16)
    wide[..., :72] = plain
    shifted = torch.zeros(plain.numel() + 1, dtype=torch.float16)[1:].view_as(plain).copy_(plain)
    return {
        "rows are 152 bytes apart": wide[..., :72],
        "columns are not adjacent": plain.transpose(2, 3).contiguous().transpose(2, 3),
        "heads are repeated": plain[:, :1].expand(2, 2, 300, 72),
        "the address is no multiple of 16": shifted,
    }


@pytest.mark.parametrize("name", strange_strides())
@pytest.mark.parametrize("place", [0, 1, 2])
def test_strides_that_tma_refuses_are_copied(monkeypatch, name, place):
    """Any strides are served: what a tensor map cannot describe is copied, and the values stay."""
    monkeypatch.setattr(launch, "processors", lambda _: 132)
    got = []
    monkeypatch.setattr(launch.Plan, "run", lambda self, *call: got.append((self, *call)))
    tensors = [torch.randn(2, 2, 300, 72, generator=torch.Generator().manual_seed(each)).half() for each in range(3)]
    tensors[place] = strange_strides()[name]
    launch.hopper_attention(KernelCall(*tensors, 0.5))
    ((held, *passed, scale, keeps, alone),) = got
    assert (scale, keeps, alone) == (0.5, False, False)
    for x, y, step in zip(passed, tensors, (held.strides[each] for each in "qkv"), strict=True):
        assert torch.equal(x, y)
        assert x.data_ptr() % 16 == 0
        assert list(x.stride()) == step
        assert x.stride(3) == 1
        assert all(each > 0 and each % 8 == 0 for each in x.stride()[:3])


def heads_first(heads, rows, dim=72):
    return torch.randn(2, heads, rows, dim, generator=torch.Generator().manual_seed(0)).half()


def tokens_first(heads, rows, dim=72):
    return heads_first(rows, heads, dim).transpose(1, 2)


@pytest.mark.parametrize(
    ("q", "is_causal", "together"),
    [
        (heads_first(38, 14), False, True),
        (heads_first(38, 14), True, False),  # rows see different keys
        (tokens_first(38, 14), False, False),  # heads of a group are no neighbours
        (heads_first(140, 1), True, True),
        (tokens_first(140, 1), False, True),
        (heads_first(2, 192), False, False),  # tiles are full
        (heads_first(4, 200), False, True),  # three tiles of 192 rows, before four
        (heads_first(2, 100, 256), False, False),
    ],
)
def test_queries_of_a_group_share_tiles_where_that_saves_some(monkeypatch, q, is_causal, together):
    """14 rows of 38 heads that share keys are 532 rows of one head; each gets the result that it gets apart."""
    monkeypatch.setattr(launch, "processors", lambda _: 132)
    k, v = (heads_first(2, 50, q.shape[3]) for _ in "kv")
    seen = []

    def attend(self, q, k, v, scale, keeps, alone):
        seen.append(q.shape)
        return pasa.golden_attention(q, k, v, is_causal=is_causal and q.shape[2] == 14, scale=scale)

    monkeypatch.setattr(launch.Plan, "run", attend)
    out, lse = launch.hopper_attention(KernelCall(q, k, v, 0.5, is_causal=is_causal))
    batch, heads, rows, dim = q.shape
    assert seen == [(batch, 2, heads // 2 * rows, dim) if together else q.shape]
    golden, golden_lse = pasa.golden_attention(q, k, v, is_causal=is_causal, scale=0.5)
    assert torch.allclose(out, golden)
    assert torch.allclose(lse, golden_lse)


def test_a_layout_of_the_batch_does_not_decide_how_a_batch_invariant_call_is_cut(monkeypatch):
    """Story: heads of a group are neighbours where a head holds one sequence, but not where it holds a batch.

    So they shared tiles in one of these calls alone, and rows of their tiles were computed again there.
    """
    seen = []
    monkeypatch.setattr(launch, "processors", lambda _: 132)
    monkeypatch.setattr(launch.Plan, "run", lambda self, q, *_: seen.append(q.shape[1:]) or (q, q[..., 0]))
    options = AttentionOptions(batch_invariant=True)
    batch = torch.zeros(38, 2, 14, 64).half().transpose(0, 1)  # each head holds the whole batch
    for q in (batch, batch[:1], batch[:1].contiguous()):
        k = torch.zeros(q.shape[0], 1, 2000, 64).half()
        launch.hopper_attention(KernelCall(q, k, k, 0.5, options))
    assert seen == [(38, 14, 64)] * 3


def test_launches_are_kept_for_a_bounded_number_of_addresses(monkeypatch):
    """They were once bounded for each geometry alone: 1,024 geometries of 128 sets held a gigabyte of the host."""
    monkeypatch.setattr(launch, "processors", lambda _: 132)
    monkeypatch.setattr(launch, "bound", {})
    monkeypatch.setattr(launch, "BOUND", 5)
    plans = []
    for keys in (64, 128):
        k = torch.zeros(1, 1, keys, 64, dtype=torch.float16)
        held = launch.Plan(k.shape, k.shape, [list(k.stride())] * 3, True, 0, torch.device("cpu"))
        monkeypatch.setattr(held, "launchers", ())
        monkeypatch.setattr(held, "_calls_at", lambda *_: ())
        plans.append(held)
    for address in range(20):
        for held in plans:
            held._bind(held.number, 0, 1.0, *[16 * address] * 6)
            assert (held.number, 0, 1.0, *[16 * address] * 6) in launch.bound
            assert len(launch.bound) <= 5
    assert plans[0].number != plans[1].number
