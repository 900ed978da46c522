"""Every Triton and Gluon kernel compiles to a cubin for the NVIDIA architectures it is meant for; no GPU is needed.

Modules of ops/ that hold a list `NVIDIA_CASES` say what to compile: dicts as in scripts/lower_triton_ascend.py, plus
    options        {"num_warps": 8, ...}
    architectures  optional: compute capabilities times ten; ARCHITECTURES without it
    stack          optional: bytes of local memory that a thread may use; STACK_BYTES without it
They are compiled by a process beside this one, because here TRITON_INTERPRET may be set, which decides when a kernel is
defined whether it can be compiled. It loads Triton once and forks for each case: where the compiler crashes, that case
fails alone.

nvidia_compiled.json records what came of each, with a key of all that this depends on: Triton's version, how a case is
compiled here, the case, and the code that the kernel reaches. A case is compiled where the record has another key; it
stays in pytest's cache, and this writes it into the record:

    python tests/ops/attention/triton/test_compiles_for_nvidia.py --record

With another Triton in front of the environment's (scripts/test_triton.sh), this compiles the I-th of N parts of all
cases, also for the newer GPUs that get the tiles of an older one, and fails if one does not compile or does not fit:

    python tests/ops/attention/triton/test_compiles_for_nvidia.py --part I/N
"""

import ast
import atexit
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
RECORD = Path(__file__).with_name("nvidia_compiled.json")
# What a thread block may take (CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability").
SHARED_KIB = {70: 96, 75: 64, 80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
UNUSED = {"3.7": ("decode_anchored_paged_kernel",)}  # kernels by versions that do not compile them: devices.py
NOT_FOR_SM_100 = ("3.6", "3.7")  # devices.SM_100_SINCE
NEWER = {90: 100, 89: 120}  # by the architecture whose tiles they get (tiles.architecture_of)
ARCHITECTURES = (80, 89, 90)  # for sm_75 Triton 3.6 makes dots of scalar FMAs: a case must ask for that by name
CRASH = "crash"  # a case that ends its process
SECONDS = 300  # for one case
STACK_BYTES = 255 * 4  # local memory of a thread: what is spilled may fill its registers once more
SETTINGS = {"TRITON_DISABLE_LINE_INFO": "1"}  # smaller; ptxas may spill some 32 bytes more or fewer


@functools.cache
def compiler():
    """Start the process that compiles; return it and its first answer, all cases. It ends when its input does."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    env |= SETTINGS
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
    )
    atexit.register(process.communicate)
    return process, json.loads(process.stdout.readline())


@functools.cache
def record_read():
    return json.loads(RECORD.read_text())


def recorded(case, architecture):
    """Return the recorded outcome of a case, or None if the case has changed since."""
    result = record_read().get(f"{case['name']}-sm_{architecture}", {})
    return result if result.get("key") == case["key"] else None


def outcome(case, architecture, pytestconfig):
    cache = str(pytestconfig.cache.mkdir("triton"))
    result = recorded(case, architecture)
    return result or compiled(module=case["module"], name=case["name"], architecture=architecture, cache=cache)


def compiled(**task):
    process, _ = compiler()
    print(json.dumps(task), file=process.stdin, flush=True)
    result = json.loads(process.stdout.readline())
    assert "error" not in result, result["error"]
    return result


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        runs = [(case, arch) for case in compiler()[1] for arch in case["architectures"]]
        ids = [f"{case['name']}-sm_{arch}" for case, arch in runs]
        metafunc.parametrize(("case", "architecture"), runs, ids=ids)


def test_compiles(case, architecture, pytestconfig):
    result = outcome(case, architecture, pytestconfig)
    assert result["cubin_bytes"] > 0
    assert result["shared"] <= SHARED_KIB[architecture] * 1024
    assert result["stack"] <= case["stack"]
    assert not result["rowless"], "warps that read rows of an operand which it does not have"


@pytest.mark.parametrize(
    ("plain", "paged"), [("lanes_90_d128", "lanes_90_d128_of_16"), ("decode_90_128x128_none", "paged_90_128x128_of_16")]
)
def test_keys_in_pages_are_loaded_as_far_ahead(plain, paged, pytestconfig):
    """Keys and values in pages are loaded as far ahead as others, which shows in the shared memory that they take.

    Story: Triton 3.6 gave the loads of the table most of the stages. K and V were loaded one block ahead, and the
    kernel took 1.4 times as long.
    """
    cases = {case["name"]: case for case in compiler()[1]}
    shared = [outcome(cases[name], 90, pytestconfig)["shared"] for name in (plain, paged)]
    assert shared[1] >= shared[0]


@pytest.mark.parametrize("name", ["hopper_d128_plain", "hopper_d128_plain_full"])
def test_the_second_part_of_a_loop_begins_where_the_first_ended(name, tmp_path):
    """A consumer on Hopper attends to the first blocks, hears from the producer, and goes on with the others.

    Story: Triton 3.6 forgot the block to go on with, because nothing read it behind the loop over both parts. Consumers
    began anew and waited for blocks that nobody loaded: every causal call on an H200 hung.
    """
    case = next(each for each in compiler()[1] if each["name"] == name)
    compiled(module=case["module"], name=name, architecture=90, cache=str(tmp_path))
    (ttgir,) = tmp_path.rglob("*.ttgir")
    form = r"scf\.for %\w+ = %c0_i32\w* to %c2_i32\w* .*?iter_args\((.*?)\) ->.*\n +%\S+ = scf\.for %\w+ = (%\w+) to"
    loops = re.findall(form, ttgir.read_text())
    assert len(loops) == 3  # one for each consumer
    assert all(f"{begin} = " in carried for carried, begin in loops)


@pytest.mark.parametrize("name", ["sm_90_d256", "sm_90_d256_full", "sm_90_d128_2"])
def test_products_do_not_wait_for_one_another(name, tmp_path):
    """Tensor cores get several products at a time.

    Story: two loops that followed each other directly made ptxas serialise the products at D = 256 (C7515).
    """
    from triton import knobs

    case = next(each for each in compiler()[1] if each["name"] == name)
    compiled(module=case["module"], name=name, architecture=90, cache=str(tmp_path))
    (cubin,) = tmp_path.rglob("*.cubin")
    code = subprocess.run([knobs.nvidia.nvdisasm.path, "-c", cubin], capture_output=True, text=True, check=True).stdout
    assert 0 < code.count("WARPGROUP.ARRIVE") <= code.count("HGMMA") / 4


def test_the_record_is_of_today():
    """The record has the key of every case; otherwise every clone compiles the changed cases again."""
    runs = {f"{case['name']}-sm_{arch}": (case, arch) for case in compiler()[1] for arch in case["architectures"]}
    stale = [name for name, run in runs.items() if not recorded(*run)]
    assert not stale, "write them with: python tests/ops/attention/triton/test_compiles_for_nvidia.py --record"
    assert json.loads(RECORD.read_text()).keys() == runs.keys()


def test_another_kernel_has_another_key():
    """A change of the case, its options or the compiler changes the key."""
    kernel = types.SimpleNamespace(__name__="attention_kernel")
    kernel.fn = types.SimpleNamespace(__module__="pasa.ops.attention.triton.prefill.kernel")
    case = {"kernel": kernel, "signature": {"p_q": "*fp16"}, "constexprs": {"D": 64}}
    others = [{}, {"name": "another"}, {"constexprs": {"D": 80}}, {"options": {"num_warps": 8}}]
    assert len({key_of(case | other, "3.6.0") for other in others} | {key_of(case, "3.7.0")}) == 4


def test_a_case_that_crashes_fails_alone(pytestconfig):
    case = compiler()[1][0]
    task = {
        "module": case["module"],
        "architecture": case["architectures"][0],
        "cache": str(pytestconfig.cache.mkdir("triton")),
    }
    with pytest.raises(AssertionError, match="no case 'nonsense'"):
        compiled(name="nonsense", **task)
    with pytest.raises(AssertionError, match=f"signal {signal.SIGSEGV}"):
        compiled(name=CRASH, **task)
    assert compiled(name=case["name"], **task)["cubin_bytes"]


def test_every_kernel_has_a_case():
    written = set()
    for path in (ROOT / "ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                marks = [ast.unparse(mark) for mark in node.decorator_list]
                if any(mark.startswith(("triton.jit", "gluon.jit")) for mark in marks):
                    written.add((path.stem, node.name))
    assert written == {(case["file"], case["kernel"]) for case in compiler()[1]}


# --- in the process that compiles


def load(module):
    return importlib.import_module(module).NVIDIA_CASES


def list_cases():
    result = []
    for path in sorted((ROOT / "ops").rglob("*.py")):
        if re.search(r"^NVIDIA_CASES\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            module = ".".join(["pasa", *path.relative_to(ROOT).with_suffix("").parts])
            for case in load(module):
                defaults = {"architectures": ARCHITECTURES, "stack": STACK_BYTES, "options": {}}
                kernel = case["kernel"]
                key = key_of(case, importlib.metadata.version("triton"))
                names = {
                    "key": key,
                    "module": module,
                    "file": kernel.__module__.rsplit(".", 1)[-1],
                    "kernel": kernel.__name__,
                }
                result.append({**names, **{key: case.get(key, defaults.get(key)) for key in ("name", *defaults)}})
    return result


@functools.cache
def sources():
    """Return the module that knows what code a kernel reaches; scripts/ is not on the path of the process."""
    spec = importlib.util.spec_from_file_location("kernel_sources", ROOT / "scripts" / "kernel_sources.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def compiling():
    """Return the code of the functions that compile a case."""
    functions = (compile_case, rowless_products, stack_bytes)
    return [sources().code_of(ast.parse(inspect.getsource(each)).body[0]) for each in functions]


def key_of(case, triton_version):
    """Eight digits for all that the outcome of a case depends on."""
    options = sorted(case.get("options", {}).items())
    depends = [*compiling(), repr(SETTINGS), triton_version, sources().source_of(case), repr(options)]
    return hashlib.sha256("\0".join(depends).encode()).hexdigest()[:8]


def record():
    """Compile what has another key than in the record, and write all."""
    written = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    result = {}
    for case in list_cases():
        for architecture in case["architectures"]:
            name = f"{case['name']}-sm_{architecture}"
            result[name] = written.get(name, {})
            if result[name].get("key") != case["key"]:
                task = {"module": case["module"], "name": case["name"], "architecture": architecture}
                result[name] = {"key": case["key"], **answer(task)}
                print(name, result[name], flush=True)
    failed = [name for name, run in result.items() if "error" in run]
    lines = [f"{json.dumps(name)}: {json.dumps(run)}" for name, run in sorted(result.items()) if name not in failed]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return len(failed)


def compile_part(part):
    """Compile a part of the cases with the installed Triton; print what is wrong, and return how many cases are.

    The limits of local memory hold for one version of the compiler. Where another one spills more, that is printed.
    """
    number, parts = map(int, part.split("/"))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where a kernel does not compile, Triton prints all of its code
    version = ".".join(importlib.metadata.version("triton").split(".")[:2])
    unused = UNUSED.get(version, ())
    newer = {each: NEWER[each] for each in NEWER if NEWER[each] != 100 or version not in NOT_FOR_SM_100}
    runs = [(case, each) for case in list_cases() for each in case["architectures"]]
    runs += [(case, newer[each]) for case, each in runs if each in newer and ".hopper." not in case["module"]]
    runs = [(case, each) for case, each in runs if case["kernel"] not in unused]
    wrong = 0
    for case, architecture in runs[number - 1 :: parts]:
        task, said = {"module": case["module"], "name": case["name"], "architecture": architecture}, []
        result = answer(task)
        stages = case["options"].get("num_stages", 1)
        while result.get("shared", 0) > SHARED_KIB[architecture] * 1024 and stages > 1:  # as launcher.py does
            stages -= 1
            said = [f"has {stages} stages, more do not fit"]
            result = answer(task | {"num_stages": stages})
        fits = "error" not in result and result["shared"] <= SHARED_KIB[architecture] * 1024 and not result["rowless"]
        wrong += not fits
        if not fits:
            said = [f"FAILED: {result}"]
        elif result["stack"] > case["stack"]:
            said.append(f"spills {result['stack']} bytes, limit {case['stack']}")
        if said:
            print(f"{case['name']}-sm_{architecture}: {'; '.join(said)}", flush=True)
    print(f"part {part}: {len(runs[number - 1 :: parts]) - wrong} compiled, {wrong} failed", flush=True)
    return wrong


def compile_case(case, architecture):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel, constants = case["kernel"], case["constexprs"]
    kinds, aligned, names = case["signature"], case.get("aligned", ()), case["kernel"].arg_names
    assert not {*kinds, *constants, *aligned} - {*names}, "arguments that the kernel does not have"
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    sixteen = [name for name, kind in signature.items() if kind.startswith("*") or name in aligned]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in sixteen}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=case.get("options", {}))
    cubin = compiled.asm["cubin"]
    return {
        "cubin_bytes": len(cubin),
        "shared": compiled.metadata.shared,
        "stack": stack_bytes(cubin),
        "rowless": rowless_products(compiled.asm["ttgir"]),
    }


def rowless_products(ttgir):
    """Products on Hopper's tensor cores that take rows from registers, of which some warps have none.

    Triton 3.6 spreads 64 rows over 8 warps; the last ones read what lies behind Q in shared memory. compute-sanitizer
    and the soak found it at D = 160 with blocks of 32 keys that have anchors, as an illegal access.
    """
    form = r"^(#\w+) = #ttg.nvidia_mma<\{versionMajor = 3,.*?warpsPerCTA = \[(\d+),"
    warps = {layout: int(count) for layout, count in re.findall(form, ttgir, re.MULTILINE)}
    form = r"warp_group_dot .* : tensor<(\d+)x\d+x\w+, #ttg.dot_op<\{opIdx = 0, parent = (#\w+),"
    return [f"{rows} rows" for rows, layout in re.findall(form, ttgir) if int(rows) < 16 * warps[layout]]


def stack_bytes(cubin):
    """Local memory of a thread, where registers spill."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(n) for n in re.findall(r"STACK:(\d+)", usage))


def answer(task):
    """Compile in a fork of this process; what comes of it, or {"error": ...}."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            signal.alarm(SECONDS)
            os.environ.update({"TRITON_CACHE_DIR": task["cache"]} if "cache" in task else {})
            if task["name"] == CRASH:
                signal.raise_signal(signal.SIGSEGV)
            case = next((each for each in load(task["module"]) if each["name"] == task["name"]), None)
            assert case, f"no case {task['name']!r}"
            if "num_stages" in task:
                case = case | {"options": case["options"] | {"num_stages": task["num_stages"]}}
            result = compile_case(case, task["architecture"])
        except BaseException:
            result = {"error": traceback.format_exc()[-3000:]}
        os.write(writing, json.dumps(result).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(text) if text else {"error": f"{task['name']} ended by signal {-code}"}


def main():
    # pasa.ops is ops/, without pasa/__init__.py, which imports torch: seconds, in every process
    for name, folder in (("pasa", "pasa"), ("pasa.ops", "ops")):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(ROOT / folder)]
    if "--record" in sys.argv:
        os.environ.update(SETTINGS)
        sys.exit(record())
    if "--part" in sys.argv:
        os.environ.update(SETTINGS)
        sys.exit(compile_part(sys.argv[-1]) > 0)
    from triton.runtime.cache import triton_key

    print(json.dumps(list_cases()), flush=True)
    triton_key()  # a hash of all of Triton, which would take every fork half a second
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
