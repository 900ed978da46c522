"""The code that a kernel is compiled from: what changes its hash, and what does not."""

import types

import kernel_sources


def test_a_kernel_is_all_that_it_reaches(tmp_path, monkeypatch):
    """Functions and constants, of other modules too, but nothing else in them."""
    monkeypatch.setattr(kernel_sources, "ROOT", tmp_path)
    (tmp_path / "ops").mkdir()
    used = "BASE = 2\nLIMIT = tl.constexpr(BASE + 1)\n@triton.jit(noinline=False)\ndef load(x):\n    return x + LIMIT\n"
    kernel = (
        "import triton.language as tl\nfrom pasa.ops.used import load as fetch\n"
        "@triton.jit\ndef a_kernel(x):\n    return fetch(tl.load(x))\n"
    )

    def digest(first, second):
        (tmp_path / "ops" / "used.py").write_text(first)
        (tmp_path / "ops" / "m.py").write_text(second)
        kernel_sources.definitions.cache_clear()
        jitted = types.SimpleNamespace(__name__="a_kernel", fn=types.SimpleNamespace(__module__="pasa.ops.m"))
        return kernel_sources.source_of({"kernel": jitted, "signature": {"x": "*fp16"}, "constexprs": {}})

    before = digest(used, kernel)
    assert digest(used + "def other(): ...\n", "# a comment\n" + kernel + "OTHER = 1\n") == before
    changes = [
        used.replace("2", "3"),
        used.replace("+ 1", "+ 2"),
        used.replace("x +", "x -"),
        used.replace("False", "True"),
    ]
    digests = {before, digest(used, kernel.replace("tl.load(x)", "x")), *(digest(text, kernel) for text in changes)}
    assert len(digests) == 6


def test_a_case_is_its_types_and_constants():
    from pasa.ops.attention.triton.prefill.cases import ASCEND_CASES

    case = ASCEND_CASES[0]
    others = [{"constexprs": case["constexprs"] | {"D": 1}}, {"signature": {}}, {"aligned": ["none"]}]
    assert len({kernel_sources.source_of(case | other) for other in [{}, {"name": "another"}, *others]}) == 4
