"""Probes of what the Ascend C kernels for Atlas A2 assume and no document promises; a deviation is found and named.

The kernels were written for the CPU twin (`ascend_c/twin`), which makes the same assumptions. Each
probe compares the device with one of them. `PROBES` is the list of what is unverified until it has
run on an NPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

import pasa
from pasa.eval.check_device.npu import calls, vendor
from pasa.eval.check_device.npu.capture import captured
from pasa.eval.check_device.npu.finding import Finding, in_ulps, same_bits
from pasa.eval.kit.error_metrics import generator

REFERENCE_WEIGHT = -0.125  # kReferenceWeight of ascend_c/tiling/tiling.h
ALIGNMENT = 512  # bytes, that parts of the workspace assume of its start
CORES = {"Ascend910B1": (24, 48), "Ascend910B2": (24, 48), "Ascend910B3": (20, 40), "Ascend910B4": (20, 40)}  # plan.h
REPEATS = 10  # launches whose results must agree, since a race shows only sometimes
HALF_ULP = 2.0**-10  # of an output near 1, twice its rounding


# ---- the vector unit


def compare_exp(device: str) -> Finding:
    """Compare Exp with the correctly rounded exponential."""
    x = torch.linspace(-103.9, 88.7, calls.NUMBERS)
    return in_ulps(calls.vector(calls.EXP, x, x, device), x.double().exp().float())


def compare_ln(device: str) -> Finding:
    """Compare Ln with the correctly rounded logarithm."""
    x = torch.exp2(torch.linspace(-120, 120, calls.NUMBERS))
    return in_ulps(calls.vector(calls.LN, x, x, device), x.double().log().float())


def compare_div(device: str) -> Finding:
    """Compare Div with the correctly rounded quotient."""
    x, y = calls.normal("div", 2, calls.NUMBERS)
    return in_ulps(calls.vector(calls.DIV, x, y, device), (x.double() / y.double()).float())


def check_overflow_mode(device: str) -> Finding:
    """Check what FP16 products beyond 65504 give in both modes of CTRL[48]."""
    x = torch.full((calls.NUMBERS,), 300.0)
    kept, saturated = (calls.vector(calls.HALF_PRODUCT, x, -x, device, saturate=each) for each in (False, True))
    gives = f"with infinities {float(kept[0])}, saturating {float(saturated[0])}"
    return Finding(not (bool((kept == -torch.inf).all()) and bool((saturated == -65504).all())), gives)


def check_integers(device: str) -> Finding:
    """Check that products and sums of int32 below 2^31 are exact, with operands of stride 0 as well."""
    draw = partial(torch.randint, size=(calls.NUMBERS,), generator=generator(0, "integers"), dtype=torch.int32)
    x, y = draw(1, 2**16), draw(1, 2**15)
    block = calls.COLUMNS // 8  # numbers, which are those of all
    factor = x[:block].repeat(calls.NUMBERS // block)
    wrong = int((calls.vector(calls.INTEGERS, x, y, device) != factor * y + y).sum())
    return Finding(wrong > 0, f"{wrong} of {calls.NUMBERS} results differ")


def check_compare_bits(device: str) -> Finding:
    """Check that the bits of Compare stand in the order of the numbers, and that Select keeps every bit it takes."""
    x, y = calls.normal("select", 2, calls.NUMBERS)
    x[::97], y[::89] = torch.inf, -torch.inf
    return same_bits(calls.vector(calls.SELECT, x, y, device), torch.where(x <= y, x, y))


def check_compare_nan(device: str) -> Finding:
    """Check that NaN is neither below nor equal to a number, and that Select keeps its bits."""
    x, y = calls.normal("select nan", 2, calls.NUMBERS)
    x[::5] = torch.nan
    y[1::5] = torch.nan
    return same_bits(calls.vector(calls.SELECT, x, y, device), y.where(~(x <= y), x))


# ---- the cube unit


def compare_sum_order(device: str) -> Finding:
    """Compare a product with sums from the first to the last term, each rounded to FP32."""
    a, b = (
        x.half()
        for x in torch.randn(2, 32, 128, generator=generator(0, "sum order")) * 2.0 ** torch.arange(-6, 2).repeat(16)
    )
    terms = a.float().unsqueeze(1) * b.float().unsqueeze(0)  # exact
    found, exact = calls.product(a, b, device)[0], (a.double() @ b.double().mT)
    orders = {name: order(terms) for name, order in ORDERS.items()}
    agreeing = [name for name, sums in orders.items() if torch.equal(sums, found)]
    bound = (a.shape[1] + 2) * 2.0**-24 * terms.double().abs().sum(-1)
    harmless = bool(((found.double() - exact).abs() <= bound).all())
    error = float(((found.double() - exact).abs() / bound).max())
    known = agreeing[0] if agreeing else "no order that was tried"
    return Finding(agreeing[:1] != ["k = 0, 1, 2, ..."], f"{known}; largest error {error:.2g} of its bound", harmless)


def check_tail_rows(device: str) -> Finding:
    """Check that NaN in L1 behind the last row of an operand reaches no product."""
    a, b = calls.small_integers("tail", 20, 64), calls.small_integers("tail too", 24, 64)
    return same_bits(calls.product(a, b, device, stale=torch.nan)[0], a.float() @ b.float().mT)


def check_half_tile(device: str) -> Finding:
    """Check that a tile stored half by half, with the whole tile's stride, is the tile stored at once."""
    a, b = calls.small_integers("half", 128, 64), calls.small_integers("half too", 128, 64)
    whole, halves, _ = calls.product(a, b, device)
    return same_bits(halves, whole)


def check_fill(device: str) -> Finding:
    """Check that a constant operand made by Fill multiplies every column."""
    a, b = calls.small_integers("fill", 128, 64), calls.small_integers("fill too", 112, 64)
    expected = a.float() @ b.float().mT + REFERENCE_WEIGHT * a[:, :16].float().sum(1, keepdim=True)
    return same_bits(calls.product(a, b, device)[2], expected)


# ---- the attention kernels


def check_accumulators(device: str) -> Finding:
    """Check tiles that come a second time in FP32, while the products of another tile are made."""
    q, k, v = calls.attention_inputs("accumulators", 256, 400)
    q, k = 8 * q, 8 * k
    out = pasa.attention(q.to(device), k.to(device), v.to(device), backend="npu").cpu()
    golden, _ = pasa.golden_attention(q, k, v)
    plain = pasa.attention(q, k, v, backend="reference", config=pasa.PasaConfig(precision="fp32"))
    worst, allowed = ((x.double() - golden).abs().max() for x in (out, plain))
    bound = 4 * float(allowed) + HALF_ULP * float(v.abs().max())
    return Finding(not float(worst) <= bound, f"largest error {float(worst):.2g}, allowed {bound:.2g}")


def check_repeated_launches(device: str) -> Finding:
    """Check that launches whose cores wait for each other give the same bits every time."""
    q, k, v = (x.to(device) for x in calls.attention_inputs("repeated", 300, 600))
    first, *others = (pasa.attention(q * 4, k, v, is_causal=True, backend="npu").cpu() for _ in range(REPEATS))
    different = sum(not torch.equal(first, other) for other in others)
    return Finding(different > 0, f"{different} of {len(others)} launches differ from the first")


def check_merged_parts(device: str) -> Finding:
    """Check that all vector cores wait for each other before they merge the parts of decoded keys."""
    source = generator(0, "merged parts")
    q, k, v = (torch.randn(1, heads, n, 64, generator=source).half() for heads, n in ((4, 1), (2, 3000), (2, 3000)))
    golden, _ = pasa.golden_attention(q, k, v)
    q, k, v = (x.to(device) for x in (q, k, v))
    outs = [pasa.attention(q, k, v, backend="npu").cpu() for _ in range(REPEATS)]
    worst = max(float((out.double() - golden).abs().max()) for out in outs)
    different = sum(not torch.equal(outs[0], other) for other in outs[1:])
    detail = f"largest error {worst:.2g}, allowed {HALF_ULP:.2g}; {different} of {REPEATS} launches differ"
    return Finding(different > 0 or not worst <= HALF_ULP, detail)


def check_unbiased_rounding(device: str) -> Finding:
    """Check the random bits of unbiased rounding: rows of two equal maxima, whose FP32 results are known."""
    q, k, v = calls.attention_inputs("unbiased", 70, 130)
    k[:, :, 7] = k[:, :, 3] = 40 * q[:, :1].float().mean(2).sign().half()
    q[:] = k[:, :, 7].sign().unsqueeze(2)
    config = pasa.PasaConfig(softmax="unbiased")
    out = pasa.attention(*(x.to(device) for x in (q, k, v)), backend="npu", config=config).cpu()
    expected = pasa.attention(q, k, v, backend="reference", config=config)
    spacing = torch.finfo(torch.float16).eps * expected.double().abs()
    harmless = bool(((out.double() - expected.double()).abs() <= spacing).all())
    return Finding(not torch.equal(out, expected), f"{int((out != expected).sum())} of {out.numel()} differ", harmless)


# ---- torch_npu


def check_chip(device: str) -> Finding:
    """Compare the chip's name and cores with the table in ascend_c/tiling/plan.h."""
    return compare_cores(CORES, device)


def compare_cores(cores: Mapping[str, tuple[int, ...]], device: str) -> Finding:
    """Compare the chip's name and cores with those of a table; other numbers of a known chip do no harm."""
    found = calls.operators().chip(torch.device(device).index or 0)
    name, *numbers = found.split()
    known = next((expected for known, expected in cores.items() if name.startswith(known)), None)
    return Finding(known != tuple(map(int, numbers)), f"{found}, expected {known}", harmless=known is not None)


def check_alignment(device: str) -> Finding:
    """Check that torch's allocator aligns what a workspace takes."""
    made = [torch.empty(size, dtype=torch.uint8, device=device) for size in (1, 33, 513, 2**20 + 5)]
    rests = [each.data_ptr() % ALIGNMENT for each in made]
    return Finding(any(rests), f"addresses modulo {ALIGNMENT}: {rests}")


def check_stream_order(device: str) -> Finding:
    """Check that a call sees the results of operators queued just before it, and those behind it see its own."""
    wrong = 0
    for turn in range(REPEATS):
        q, k, v = (x.to(device) for x in calls.attention_inputs(f"stream {turn}", 40, 200))
        expected = pasa.attention(q + 1, k, v, backend="reference").float().sum(-1).cpu()
        found = pasa.attention((q + 0.5) + 0.5, k, v, backend="npu").float().sum(-1).cpu()
        wrong += not bool(((found - expected).abs() <= 0.5).all())
    return Finding(wrong > 0, f"{wrong} of {REPEATS} calls read or were read too early")


def check_capture(device: str) -> Finding:
    """Check that a captured call is repeated on new inputs, and that none was captured outside of a graph."""
    q, k, v = (x.to(device) for x in calls.attention_inputs("capture", 40, 200))
    replay, out = captured(partial(pasa.attention, q, k, v, backend="npu"), device)
    changed = calls.attention_inputs("captured", 40, 200)[0].to(device)
    q.copy_(changed)
    replay()
    expected = pasa.attention(changed, k, v, backend="npu")
    return same_bits(out.cpu(), expected.cpu())


Probes = dict[str, tuple[str, Callable[[str], Finding]]]
PROBES: Probes = {
    "Exp": ("bits of Exp are those of the correctly rounded function", compare_exp),
    "Ln": ("bits of Ln are those of the correctly rounded function", compare_ln),
    "Div": ("bits of Div are those of the correctly rounded quotient", compare_div),
    "overflow mode": ("SetSaturationFlag sets what overflow gives (CTRL[48])", check_overflow_mode),
    "integers": ("int32 products and sums below 2^31 are exact, with strides of 0 too", check_integers),
    "Compare bits": ("bits of Compare stand in the order of the numbers; Select keeps bits", check_compare_bits),
    "Compare NaN": ("NaN is neither below nor equal to a number", check_compare_nan),
    "order of sums": ("Mmad adds its terms in order, each rounded to FP32", compare_sum_order),
    "rows behind a tile": ("what lies behind the rows of a tile in L1 reaches no product", check_tail_rows),
    "half a tile": ("Fixpipe of half a tile takes the whole tile's stride", check_half_tile),
    "Fill": ("Fill into L0B makes a constant operand", check_fill),
    "two accumulators": ("a tile in L0C stays intact while another one is made", check_accumulators),
    "repeated launches": ("flags and the scalar read of a verdict order the cores", check_repeated_launches),
    "merged parts": ("SyncAll orders the vector cores of a kernel that has cube cores as well", check_merged_parts),
    "unbiased rounding": ("random bits of unbiased rounding are those of the reference", check_unbiased_rounding),
    "chip": ("the runtime names the chip and its cores as the tiling expects", check_chip),
    "alignment": (f"torch_npu's allocator aligns to {ALIGNMENT} bytes", check_alignment),
    "stream order": ("launches run in the order of torch_npu's operators", check_stream_order),
    "capture": ("a call can be captured in a graph and repeated", check_capture),
    "vendor's scores": ("inner_precise=0 keeps scores as pasa lists for an NPU", vendor.check_scores),
    "vendor's masks": ("inner_precise=2 gives 0 in fully masked rows; causal masks align at the top left",
                       vendor.check_masks),
    "vendor's log-sum-exp": ("the log-sum-exp has one number a row, in nats", vendor.check_lse),
}  # fmt: skip
"""Each probe by name: what the kernels assume, and the function that compares the device with it."""


# ---- orders of sums


def _in_order(terms: Tensor) -> Tensor:
    total = torch.zeros(terms.shape[:-1])
    for term in terms.unbind(-1):
        total = total + term
    return total


def _in_pairs(terms: Tensor) -> Tensor:
    while terms.shape[-1] > 1:
        terms = terms[..., ::2] + terms[..., 1::2]
    return terms.squeeze(-1)


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "k = 0, 1, 2, ...": _in_order,
    "the last term first": lambda terms: _in_order(terms.flip(-1)),
    "in pairs": _in_pairs,
    "sixteen terms exactly, then in order": lambda terms: _in_order(
        terms.unflatten(-1, (-1, 16)).double().sum(-1).float()
    ),
    "sixteen terms in pairs, then in order": lambda terms: _in_order(_in_pairs(terms.unflatten(-1, (-1, 16)))),
    "exactly, rounded once": lambda terms: terms.double().sum(-1).float(),
}
"""Orders in which a cube unit may add the terms of a product, the last axis."""
