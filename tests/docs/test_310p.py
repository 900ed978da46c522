"""The pages on the Ascend 310P name every call of the kernels, and plan for memory that the chip has."""

import re

from tests.docs.pages import ROOT

FACTS = (ROOT / "docs" / "ascend" / "310p.md").read_text("utf-8")
DESIGN = (ROOT / "ascend_c" / "310p.md").read_text("utf-8")
QUALIFIED = re.compile(r"AscendC::([A-Z]\w*)(?:<[^;({]*>)?\(")
MEMBER = re.compile(r"(?:[\w\])]\.|\(\)->)([A-Z]\w*)(?:<[^;({]*>)?\(")
OWN = re.compile(r"__aicore__ inline (?:const )?[\w:<>, ]+?[&* ]+(\w+)\(")  # functions that the kernels define
STRUCTURES = {"BinaryRepeatParams", "UnaryRepeatParams", "BrcbRepeatParams", "DataCopyPadExtParams", "LocalTensor"}
# Calls that the patterns do not see: one without a namespace, one over two lines, one with the name of a function here.
OTHERS = {"GetTPipePtr", "DataCacheCleanAndInvalid", "Get"}


def calls_of_the_kernels():
    """Return the names of the vendor's functions that `ascend_c/kernel` calls."""
    files = sorted((ROOT / "ascend_c" / "kernel").rglob("*.h"))
    code = "\n".join(re.sub(r"//.*", "", path.read_text("utf-8")) for path in files)
    assert all(name in code for name in OTHERS)
    return (set(QUALIFIED.findall(code)) | OTHERS | (set(MEMBER.findall(code)) - set(OWN.findall(code)))) - STRUCTURES


def test_every_call_of_the_kernels_has_a_row():
    called = calls_of_the_kernels()
    assert {"Fixpipe", "ReduceDataBlock", "FetchEventID", "EnQue", "SetGlobalBuffer"} <= called
    table = FACTS.partition("## The calls of our kernels")[2].partition("\n## ")[0]
    rows = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    assert called - rows == set(), "add what the vendor's page says of Atlas inference products"
    assert rows - called == set(), "these rows are about calls that no kernel makes"


def test_planned_buffers_add_up_and_fit():
    rows = re.findall(r"^\| (\*{0,2})(\w+)\1 \| (.+?) \| (.+) \|$", DESIGN, re.MULTILINE)
    sums, checked = {}, []
    for bold, memory, text, numbers in rows:
        if memory not in ("UB", "L1", "L0A", "L0B", "L0C"):
            continue
        parts = [int(number) for number in re.findall(r"\d+", numbers)]
        if bold:
            limit = int(re.search(r"of (\d+)", text)[1])
            assert sums.pop(memory) == parts, memory
            assert max(parts) <= limit, memory
            checked.append((memory, limit))
        else:
            sums[memory] = [a + b for a, b in zip(sums.get(memory, [0] * len(parts)), parts, strict=True)]
    prefill = [("UB", 248), ("L1", 1024), ("L0A", 64), ("L0B", 64), ("L0C", 256)]
    assert checked == prefill + [each for each in prefill if each[1] > 64]  # decoding fills L0A and L0B likewise
    assert not sums
