"""Mutants of the batch-invariant mode: each lets the batch decide something again."""

from tests.mutants.mutant import Mutant

DECODE, PAGED_LAUNCH = (f"ops/attention/triton/decode/{name}launch.py" for name in ("", "paged_"))
TESTS = "tests/properties/test_batch_invariance.py::"
BITS, CONSTANTS = (TESTS + name for name in ("test_no_batch_changes_a_bit", "test_launches_of_a_sequence"))
CONSTANTS += "_have_the_same_constants"


def mutant(what: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """Return a mutant of the batch-invariant mode."""
    return Mutant(f"batch invariance: {what}", file, old, new, tests)


BATCHES = [
    mutant(
        "the splits of a sequence depend on the longest one",
        "ops/attention/triton/decode/tile_math.py",
        "    if LEAST > 0:\n        each",
        "    if LEAST < 0:\n        each",
        f"{BITS}[triton-decode-0]",
    ),
    mutant(
        "programs of a head without keys take those of others",
        "ops/attention/triton/decode/lanes_kernel.py",
        "    rest = tl.where(o_split < splits, rest, keys)\n",
        "",
        f"{BITS}[triton-decode-0]",
    ),
    mutant(
        "the exact pass of such programs takes the keys of others",
        "ops/attention/triton/decode/lanes_kernel.py",
        "    first = tl.where(o_split < parts, (o_split * LANES + o_lane) * BLOCK_N, keys)\n",
        "    first = (o_split * LANES + o_lane) * BLOCK_N\n",
        f"{BITS}[triton-decode-0]",
        f"{BITS}[triton-decode-1]",
    ),
    mutant(
        "with page anchors, such programs take whole blocks of others",
        "ops/attention/triton/decode/paged_anchored_kernel.py",
        "    first = tl.where(o_split < parts, o_split * BLOCK, keys)\n",
        "    first = o_split * BLOCK\n",
        f"{BITS}[triton-anchored-0]",
        f"{BITS}[triton-anchored-1]",
    ),
    mutant(
        "with page anchors, such programs take the last block of others",
        "ops/attention/triton/decode/paged_anchored_kernel.py",
        "    rest = tl.where(o_split < parts, rest, keys)\n",
        "",
        f"{BITS}[triton-anchored-0]",
        f"{BITS}[triton-anchored-1]",
    ),
    mutant(
        "the splits of a dense call depend on the batch",
        DECODE,
        "        each = -(-blocks // fixed_splits(keys, *fixed_limits(call)))\n",
        "        each = blocks_of_a_split(processors(device), blocks, pairs, split_limit(call) // LANES)\n",
        f"{BITS}[triton-dense-0]",
        f"{BITS}[triton-dense-1]",
    ),
    mutant(
        "the merge has room for the splits of the longest sequence",
        PAGED_LAUNCH,
        "tile.block_m, most * lanes)",
        "tile.block_m)",
        f"{CONSTANTS}[decode-exact]",
    ),
    mutant(
        "the longest sequence decides how many queries a tile has",
        PAGED_LAUNCH,
        "call, others, cu_q, max(1, DECODE_TILE // call.group))",
        "call, others, cu_q, min(longest_q, max(1, DECODE_TILE // call.group)))",
        f"{CONSTANTS}[paged-exact]",
    ),
    mutant(
        "one query is a call of its own only if no sequence has more",
        PAGED_LAUNCH,
        "single = used & (counts[owner] == 1)",
        "single = used & (counts[owner] == 1) & (longest_q == 1)",
        f"{BITS}[triton-paged-0]",
    ),
    mutant(
        "packed tokens decide how tall a tile is",
        "ops/attention/triton/kernel_call.py",
        "return FULL if self.options.batch_invariant and self.cu_q is not None else self.rows",
        "return self.rows",
        f"{CONSTANTS}[packed-exact]",
    ),
    mutant(
        "the fastest tile is taken",
        "ops/attention/triton/prefill/launch.py",
        "    if options.batch_invariant:\n        tiles = tiles[:1]",
        "    if False:\n        tiles = tiles[:1]",
        f"{CONSTANTS}[packed-exact]",
    ),
    mutant(
        "the batch decides how tall Hopper's tiles are",
        "ops/attention/triton/hopper/launch.py",
        "warpgroups(heads if invariant else batch * heads, rows",
        "warpgroups(batch * heads, rows",
        f"{TESTS}test_height_of_hoppers_tiles",
    ),
    mutant(
        "the reference attends to all entries at once",
        "ops/attention/spec/attention.py",
        "attend_each(_attend_dense, call) if call.options.batch_invariant else",
        "attend_each(_attend_dense, call) if False else",
        f"{BITS}[reference-dense-0]",
    ),
]
