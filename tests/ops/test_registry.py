"""The registry enforces every field of a capability record, and the reference does all that its record claims."""

import dataclasses
import itertools
import re
import warnings

import pytest
import torch

import pasa
from pasa.ops import devices, notices, operators, registry
from pasa.ops.attention.call import FEATURES, Call, Pages
from pasa.ops.attention.options import CHOICES, AttentionOptions
from pasa.ops.backends import Backend, Request
from pasa.ops.registry import BACKENDS, register, select

REFERENCE = BACKENDS["reference"]
CALL = Request("cpu", torch.float16, 64, "none")


@pytest.fixture
def isolated_registry(monkeypatch):
    monkeypatch.setattr(registry, "BACKENDS", {"reference": REFERENCE})
    return registry.BACKENDS


def test_names_of_the_architecture():
    assert sorted(BACKENDS) == ["npu", "reference", "sdpa", "triton"]
    listed = pasa.backends()
    assert [line.name for line in listed if line.available] == [
        "triton",
        "sdpa",
        "reference",
    ]  # Triton is interpreted, or on a GPU
    assert all(line.reason for line in listed)


def test_triton_says_why_it_cannot_run(monkeypatch):
    """Without Triton the list of backends gives a reason, instead of raising an ImportError."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "neither a CUDA GPU nor an NPU" in BACKENDS["triton"].missing()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "no tensor-core product for sm_75" in BACKENDS["triton"].missing()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert BACKENDS["triton"].missing() is None
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in BACKENDS["triton"].missing()
    # A new record, so that no earlier call of it is cached.
    monkeypatch.setitem(BACKENDS, "triton", dataclasses.replace(BACKENDS["triton"]))
    q = torch.zeros(1, 1, 2, 16, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="triton is not installed"):
        pasa.attention(q, q, q, backend="triton")


@pytest.fixture
def turing(monkeypatch):
    """Simulate a machine whose GPU is an sm_75."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    registry.choose.cache_clear()
    notices.warn_once.cache_clear()
    yield
    registry.choose.cache_clear()
    notices.warn_once.cache_clear()


def serve(device="cuda", head_dim=64, backend=None, features=(), **options):
    """Return the backend that the operator chooses for such tensors."""
    needs = (device, torch.float16, head_dim, "none", features)
    return registry.choose(tuple(BACKENDS.values()), backend, needs, AttentionOptions(**options).arguments)[2]


def test_a_gpu_without_kernels_is_served_by_its_own_attention(turing):
    """A T4 gets torch's fused attention, guarded, and the reason is in the list of servers.

    Story: GPUs below sm_80, or without Triton, were silently emulated.
    """
    assert serve() == "sdpa"
    result = dict(registry.servers())
    assert result["cuda"].startswith("sdpa (triton: Triton forms no tensor-core product for sm_75")
    assert result["cpu"] == "sdpa"
    assert {line.name: line.serves for line in pasa.backends()}["sdpa"] == ("cuda", "cpu")


def test_an_emulation_that_was_not_asked_for_warns_once(turing):
    """No fused attention has soft caps, so without our kernels the reference serves them, slowly."""
    with pytest.warns(UserWarning, match="soft caps are not supported") as caught:
        assert [serve(head_dim=head_dim, features=("soft caps",)) for head_dim in (64, 64, 128)] == ["reference"] * 3
    assert len(caught) == 1
    for word in ("cuda tensors", "'reference', an emulation", "not for speed"):
        assert word in str(caught[0].message)
    assert caught[0].filename == __file__


def test_a_head_too_wide_for_the_kernels_goes_to_the_fused_attention(turing, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert serve(head_dim=256) == "triton"
    assert serve(head_dim=300) == "sdpa"


def test_who_serves_is_asked_with_what_the_calls_are(turing, monkeypatch):
    """`servers` answers for the calls that will be made.

    Story: it answered for FP16, head dim 64 and default options, whatever the calls. Calls that
    Triton cannot serve were listed as Triton's.
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))  # for which no shapes were measured
    half = torch.float16
    assert dict(registry.servers())["cuda"] == "triton"
    saturating = dict(registry.servers(options=AttentionOptions(overflow="saturate")))
    why = "overflow saturate is not among inf"
    assert saturating["cuda"] == f"reference (triton: {why}; sdpa: {why})"
    two = dict(registry.servers([(half, 64), (half, 512)]))["cuda"]
    assert two == (
        "triton for float16, head dim 64; sdpa (triton: head dim 512 is outside 1 to 256) for float16, head dim 512"
    )
    named = dict(registry.servers(options=AttentionOptions(precision="partial"), name="triton"))["cuda"]
    assert named.startswith("nobody (no backend can serve this call: triton: precision partial is not among pasa, fp32")


def test_who_asks_for_the_emulation_is_not_warned_of_it(turing):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert serve(backend="reference") == serve(features=("diagnostics",)) == "reference"
        assert serve(overflow="saturate") == serve(precision="partial") == "reference"


def test_a_cpu_tensor_goes_to_the_interpreter_only_by_name(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select(CALL).name == "sdpa"
    assert select(CALL, "triton").name == "triton"


@pytest.mark.parametrize("change", [{"name": "not a name"}, {"head_dims": (0, 4)}, {"head_dims": (8, 4)}])
def test_records_validate_themselves(change):
    with pytest.raises(ValueError, match=str(next(iter(change.values()))).replace("(", r"\(").replace(")", r"\)")):
        dataclasses.replace(REFERENCE, **change)


def test_a_name_is_taken_once(isolated_registry):
    with pytest.raises(ValueError, match="'reference' is already registered"):
        register(REFERENCE)


RESTRICTIONS = [
    ({"devices": ("npu",)}, "device cpu is not among npu"),
    ({"dtypes": (torch.bfloat16,)}, "dtype torch.float16 is not among torch.bfloat16"),
    ({"masks": ("bool",)}, "mask none is not among bool"),
    *(
        ({"accepts": {name: ("other",)}}, f"{name} {default} is not among other")
        for name, default in dataclasses.asdict(AttentionOptions()).items()
    ),
    (
        {"not_together": ({"softmax": "safe", "recovery": "exact"},)},
        "softmax safe with recovery exact is not supported",
    ),
    ({"head_dims": (65, 128)}, "head dim 64 is outside 65 to 128"),
    ({"missing": lambda: "no such device here"}, "no such device here"),
]


@pytest.mark.parametrize(("restriction", "reason"), RESTRICTIONS, ids=[reason for _, reason in RESTRICTIONS])
def test_every_field_is_enforced(restriction, reason):
    assert dataclasses.replace(REFERENCE, **restriction).refusals(CALL) == [reason]


def test_an_option_that_a_record_does_not_name_is_served_with_its_default_alone():
    """Kernels refuse an option that their record does not name, unless it has its default.

    So an option that is added later is never ignored.
    """
    record = dataclasses.replace(REFERENCE, accepts={})
    assert record.refusals(CALL) == []
    changed = {name: values[-1] for name, values in CHOICES.items() if name != "precision"}  # beta needs "pasa"
    changed |= {"beta": 0.5, "block_q": 64, "block_k": 64, "batch_invariant": True}
    reasons = record.refusals(dataclasses.replace(CALL, options=AttentionOptions(**changed)))
    assert {reason.split()[0] for reason in reasons} == set(changed)
    assert {"precision", *changed} == {each.name for each in dataclasses.fields(AttentionOptions)}


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_enforced(feature):
    """A record refuses a feature that it does not name, and may serve one with fewer options than a plain call."""
    call = dataclasses.replace(CALL, features=(feature,))
    assert REFERENCE.refusals(call) == []
    lacking = dataclasses.replace(REFERENCE, features=[each for each in FEATURES if each != feature])
    assert lacking.refusals(CALL) == []
    assert lacking.refusals(call) == [f"{feature} are not supported"]
    limited = dataclasses.replace(
        REFERENCE, feature_options={feature: {"recovery": ("paper",), "precision": ("pasa",)}}
    )
    assert limited.refusals(CALL) == []
    assert limited.refusals(call) == [f"{feature} are served with recovery paper, not exact"]


def test_a_call_names_its_features():
    q, sinks, pages = torch.zeros(1, 1, 2, 8), torch.zeros(1), Pages(torch.zeros(1, 1), torch.zeros(1))
    cases = {
        "packed sequences": {"q": q[0]}, "paged caches": {"q": q[0], "pages": pages}, "windows": {"window": (0, -1)},
        "sinks": {"sinks": sinks}, "soft caps": {"softcap": 1.0}, "max logits": {"max_logits": True},
        "diagnostics": {"diagnose": True},
    }  # fmt: skip
    plain = Call(q, q, q, 1.0)
    assert plain.features == ()
    assert {name: dataclasses.replace(plain, **how).features for name, how in cases.items()} == {
        name: (name,) for name in FEATURES
    }
    together = {name: value for how in cases.values() for name, value in how.items()}
    assert dataclasses.replace(plain, **together).features == FEATURES[1:]


def test_restrictions_cover_the_record():
    """Every field of the record has a test that it refuses calls."""
    tested = {name for restriction, _ in RESTRICTIONS for name in restriction}
    tested |= {"features", "feature_options", "devices_by_name"}  # each has a test of its own
    assert {f.name for f in dataclasses.fields(Backend)} - tested == {
        "name",
        "module",
        "label",
        "priority",
        "functions",
        "slower",  # tests/ops/test_devices.py
        "limits",  # tests/ascend_c/test_binding_310p.py
        "repeatable",
    }


def test_preferred_backend_that_can_serve(isolated_registry):
    better = dataclasses.replace(REFERENCE, name="better", priority=5, masks=("bool",))
    register(better)
    assert select(CALL) is REFERENCE
    assert select(dataclasses.replace(CALL, mask="bool")) is better
    with pytest.raises(NotImplementedError, match="better: mask none"):
        select(CALL, "better")


def test_all_reasons_are_listed():
    call = dataclasses.replace(CALL, head_dim=1000)
    with pytest.raises(NotImplementedError, match=r"npu: .*triton: .*sdpa: .*reference: head dim 1000 is outside"):
        select(call)


# Without softmax: "unbiased_paper" loses rows whose repeated maximum is large, such as these.
ARITHMETIC = {name: values for name, values in CHOICES.items() if name != "softmax"}


@pytest.mark.parametrize("choices", list(itertools.product(*ARITHMETIC.values())), ids="-".join)
@pytest.mark.parametrize("mask", REFERENCE.masks)
def test_the_reference_does_what_it_claims(choices, mask):
    config = pasa.PasaConfig(**dict(zip(ARITHMETIC, choices, strict=True)))
    masks = {"none": None, "bool": torch.tensor([True, False]), "float": torch.tensor([0.5, -torch.inf])}
    for dtype in REFERENCE.dtypes:
        for dim in (REFERENCE.head_dims[0], 3, REFERENCE.head_dims[1]):
            x = torch.ones(1, 1, 2, dim, dtype=dtype)
            out = pasa.attention(x, x, x, attn_mask=masks[mask], config=config)
            torch.testing.assert_close(out, x)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Backend)])
def test_records_are_frozen(name):
    with pytest.raises(dataclasses.FrozenInstanceError, match=name):
        setattr(REFERENCE, name, getattr(REFERENCE, name))


def test_every_reason_is_listed_the_missing_device_first():
    record = dataclasses.replace(
        REFERENCE, missing=lambda: "no device", devices=("npu",), dtypes=(), masks=(), head_dims=(1, 2), features=()
    )
    reasons = record.refusals(dataclasses.replace(CALL, features=("packed sequences",)))
    assert reasons[0] == "no device"
    assert [reason.split()[0] for reason in reasons] == ["no", "device", "dtype", "mask", "head", "packed"]


def test_unknown_name_lists_the_registered():
    for name in ("Reference", "cuda", ""):
        refusal = f"backend={name!r} is not registered; registered: {sorted(BACKENDS)}"
        with pytest.raises(ValueError, match=re.escape(refusal)):
            select(CALL, name)


def test_a_named_backend_never_falls_back(isolated_registry):
    """A named backend is used or refused; served by another one, a measurement of it would be false."""
    register(dataclasses.replace(REFERENCE, name="other", priority=9, missing=lambda: "not here"))
    assert select(CALL) is REFERENCE
    with pytest.raises(NotImplementedError, match=r"^no backend can serve this call: other: not here$"):
        select(CALL, "other")


def test_priority_decides_whatever_the_order_of_registration(isolated_registry):
    for priority in (3, 7, 5):
        register(dataclasses.replace(REFERENCE, name=f"p{priority}", priority=priority))
    assert select(CALL).name == "p7"
    assert [line.name for line in pasa.backends()] == ["p7", "p5", "p3", "reference"]


def test_the_call_reaches_the_registry_whole(isolated_registry):
    """The operator passes on all that the caller gave: each restriction appears in the refusal."""
    q = torch.zeros(1, 1, 2, 8, dtype=torch.float16)
    cases = {
        "masks": ({"attn_mask": torch.zeros(2, 2)}, "mask float"),
        "precision": ({"config": pasa.PasaConfig(precision="fp32")}, "precision fp32"),
        "recovery": ({"config": pasa.PasaConfig(recovery="paper")}, "recovery paper"),
        "accumulate": ({"config": pasa.PasaConfig(accumulate="fp16")}, "accumulate fp16"),
        "overflow": ({"config": pasa.PasaConfig(overflow="saturate")}, "overflow saturate"),
    }
    for field, (how, reason) in cases.items():
        only_defaults = {"masks": ("none",)} if field == "masks" else {"accepts": {}}
        isolated_registry["reference"] = dataclasses.replace(REFERENCE, **only_defaults)
        pasa.attention(q, q, q)
        with pytest.raises(NotImplementedError, match=reason):
            pasa.attention(q, q, q, **how)
    isolated_registry["reference"] = dataclasses.replace(REFERENCE, features=())
    rows, edges = q[0].transpose(0, 1), torch.tensor([0, 2])
    with pytest.raises(NotImplementedError, match="packed sequences are not supported"):
        pasa.attention_varlen(rows, rows, rows, edges, edges, 2, 2)
    with pasa.record_diagnostics(), pytest.raises(NotImplementedError, match="diagnostics are not supported"):
        pasa.attention(q, q, q)


def test_a_choice_is_remembered_and_a_refusal_is_not(isolated_registry):
    """A choice is cached and a refusal is not; the machine used to be queried at every call."""
    answers = ["not yet", None, "asked again"]
    isolated_registry["reference"] = dataclasses.replace(REFERENCE, missing=lambda: answers.pop(0))
    q = torch.zeros(1, 1, 2, 8, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="not yet"):
        pasa.attention(q, q, q)
    for _ in range(2):
        pasa.attention(q, q, q)
    with pytest.raises(NotImplementedError, match="asked again"):  # another kind of call
        pasa.attention(q, q, q, config=pasa.PasaConfig(precision="fp32"))


def test_a_backend_that_is_registered_later_is_seen(isolated_registry):
    q = torch.zeros(1, 1, 2, 8, dtype=torch.float16)
    pasa.attention(q, q, q)
    register(dataclasses.replace(REFERENCE, name="later", module="no_such_module", priority=5))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        pasa.attention(q, q, q)


def test_pages_of_any_head_dimension_are_written_by_the_kernel(monkeypatch):
    """The kernel that writes pages serves every head dimension, also those to which Triton does not attend.

    Story: the registry held the limit of attention, 256, against writes too. Wider caches on a GPU were then written by
    the reference: a slot beyond the cache, which the kernel skips, ended the process' CUDA context.
    """
    record = dataclasses.replace(BACKENDS["triton"], missing=lambda: None)
    monkeypatch.setitem(BACKENDS, "triton", record)
    assert registry.provider("write_pages", "cuda") is record.load()
    assert registry.provider("count_scores", "cuda", 256) is record.load()
    assert registry.provider("count_scores", "cuda", 257) is None
    assert registry.provider("write_pages", "cpu") is None
    asked = []
    monkeypatch.setattr(operators.registry, "provider", lambda *request: asked.append(request))
    cache = torch.zeros(1, 16, 2, 512).half()
    pasa.write_pages(cache[0, :1], cache[0, :1], cache, cache.clone(), torch.tensor([3]))
    assert asked == [("write_pages", "cpu")]


def test_who_offers_a_function_is_found_out_once(monkeypatch):
    """The machine is not asked at every call.

    Story: it was, for every write of pages and every watched call. That took 11 us on the host of an H200.
    """
    times = []
    record = dataclasses.replace(BACKENDS["triton"], missing=lambda: times.append(1))
    monkeypatch.setitem(BACKENDS, "triton", record)
    for _ in range(3):
        assert registry.provider("count_scores", "cuda", 64) is record.load()
    assert len(times) == 1


@pytest.mark.parametrize("dtype", REFERENCE.dtypes, ids=str)
@pytest.mark.parametrize("dim", REFERENCE.head_dims)
def test_the_reference_serves_packed_sequences_and_diagnostics(dtype, dim):
    x = torch.ones(5, 2, dim, dtype=dtype)
    edges = torch.tensor([0, 2, 5])
    with pasa.record_diagnostics() as records:
        out, lse = pasa.attention_varlen(x, x, x, edges, edges, 3, 3, return_lse=True)
    torch.testing.assert_close(out, x)
    assert torch.isfinite(lse).all()
    assert (records[0].max_score_before == dim).all()
