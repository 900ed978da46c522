"""Make copies of the kernels in which one statement can be left out, made smaller or wrong, chosen at run time.

A mutant is a number; 0 is the unchanged kernel. One program holds all mutants, because compiling takes longest.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.ascend_c.twin_build import TWIN

ASCEND_C = TWIN.parent
SYNCHRONISATION = (
    "PipeBarrier",
    "SetFlag",
    "WaitFlag",
    "CrossCoreSetFlag",
    "CrossCoreWaitFlag",
    "SyncAll",
    "DataCacheCleanAndInvalid",
)
CALL = re.compile(rf"AscendC::({'|'.join(SYNCHRONISATION)})(<[^;]*?>)?\([^;]*?\);", re.DOTALL)
BUFFER = re.compile(r"(pipe\.InitBuffer\(\w+,\s*(?:[\w.]+,\s*)?)([^;]*?)\);", re.DOTALL)
ADDED = """AscendC::Add(score_tile_[c], score_tile_[c], bias[c], Least(kFloats, count - c), rows,
                         AscendC::BinaryRepeatParams(1, 1, 1, kTileBlocks, kTileBlocks, stride));"""
# Each entry breaks one rule of the arithmetic: the statement, and its replacement.
RULES = {
    "first tile below its guess is not rescued": (
        "if (guessed != 0)",
        "if (false)",
    ),
    "a reference above the running maximum is not tested": (
        "seeing.Larger(Number(kReached), Number(kTop), Number(slot, kRaised));",
        "seeing.Scale(Number(kReached), Number(kTop), 1.0f);",
    ),
    "a tiny scale is not tested": (
        "return kHalfLargest * factor < kZeroWeight && HasBottom(rows, factor);",
        "return false;",
    ),
    "a reference too high for a term is not clamped": (
        "all_.AtMost(high, rho, kHalfLargest);",
        "all_.Scale(high, rho, 1.0f);",
    ),
    "a reference too low for a term is not clamped": (
        "all_.AtLeast(high, high, lowest_ > -kHalfLargest ? lowest_ : -kHalfLargest);",
        "",
    ),
    "a reference too high for both terms is not clamped": (
        "all_.AtMost(rest, rho, 2 * kHalfLargest);",
        "all_.Scale(rest, rho, 1.0f);",
    ),
    "a reference too low for both terms is not clamped": ("all_.AtLeast(rest, rest, lowest_);", ""),
    "a reference far below 0 is not clamped": ("if (kFarthest < 2 * kHalfLargest * factor)", "if (false)"),
    "a guess far above 0 is not clamped": ("RowMath(guessed_).AtMost(rho, rho, -lowest_);", ""),
    "weights are not bounded by the maximum of their tile": (
        "all.Larger(shift, row_sum, top);",
        "all.Scale(shift, row_sum, 1.0f);",
    ),
    "a fully masked row keeps the result of masked keys": (
        "AscendC::Duplicate(Output(i)[r * t_.dim], 0.0f, static_cast<int32_t>(t_.dim));",
        "",
    ),
    "a window's left edge is not applied": (
        "if (tasks_.Before(task, first_row + rows - 1) <= first_key)",
        "if (true)",
    ),
    "a window hides its last key too": (
        "HideColumnsBefore(tile[r * kBlockKeys], Least(before - first_key, kBlockKeys), kHidden);",
        "HideColumnsBefore(tile[r * kBlockKeys], Least(before - first_key + 1, kBlockKeys), kHidden);",
    ),
    "a mask is not applied": (
        """AscendC::Compares(bits[first * kBlockKeys / 8], numbers, static_cast<half>(0.0f), AscendC::CMPMODE::NE,
                              here * kBlockKeys);""",
        """AscendC::Compares(bits[first * kBlockKeys / 8], numbers, static_cast<half>(0.0f), AscendC::CMPMODE::GE,
                             here * kBlockKeys);""",
    ),
    "a mask is that of the first head": (
        "at += task.head % t_.heads * t_.mask.head_stride;",
        "",
    ),
    "a mask is that of the first batch entry": ("at += task.batch * t_.mask.batch_stride;", ""),
    "a sink takes no share of the weights": ("all.Multiply(sum, sum, apart);", ""),
    "the log-sum-exp is below a sink": ("all.Larger(maximum, maximum, sink);", ""),
    "sinks are counted over batch entries": (
        "sink = sinks_.GetValue(task.head % t_.heads);",
        "sink = sinks_.GetValue(task.head);",
    ),
    "a score far above the reference of the weights does not move it": (
        "if (extremes.ahead > kMoveReach)",
        "if (false)",
    ),
    "weights are not bounded by the maximum of a tile that moves references": (
        "all.Larger(Number(kGap), Number(kGap), top);",
        "",
    ),
    "a reference falls": ("all.Larger(highest, highest, maximum);", ""),
    "the output so far is not rescaled": ("Rescale(rows);", ""),
    "l is not rescaled": ("RowMath(0, rows).Multiply(Number(0, kSum), Number(0, kSum), Number(kKeep));", ""),
    "L0C is not flushed": ("if ((wanted_[half] & kWantsOutput) != 0)", "if (false)"),
    "products are added to those of a flush": ("running_[half] = false;", ""),
    "a tile with an offset is taken for one without": ("if (aligned)", "if (true)"),
    "scores are never scaled": ("if (factor_[slot] != 1.0f)", "if (false)"),
    "a new reference is not loaded": ("if (j < 2 || brought_[slot])", "if (j < 2)"),
    "a reference is kept although the weights' move": ("if (!plain || moves)", "if (!plain)"),
    "a reference is kept although the weights' moved a block ago": (
        "return plain_[slot] && settled_ && next_factor == factor_[slot];",
        "return plain_[slot] && next_factor == factor_[slot];",
    ),
    "a reference is kept for a block with an offset": ("if (apart != 0.0f)", "if (false)"),
    "a reference that was begun before the weights' moved is sent": ("next_.Restart();", ""),
    "the rounding of K - anchor is not tested": ("pairs.Subtract(back, keys);", "pairs.Subtract(back, back);"),
    "an anchor that rounds a difference is kept": ("math.Subtract(anchor, anchor, bad);", ""),
    "the grid has no floor": ("math.AtLeast(grid, grid, kSmallestHalf);", ""),
    "an anchor far longer than a key is kept": (
        "math.Larger(bad, bad, of_lowest);",
        "math.Scale(bad, of_lowest, 1.0f);",
    ),
    "an anchor below 0 is not compared with the largest key": (
        "math.Larger(bad, of_lowest, of_highest);",
        "math.Scale(bad, of_lowest, 1.0f);",
    ),
    "an anchor above 0 is not compared with the smallest key": (
        "math.Larger(bad, of_lowest, of_highest);",
        "math.Scale(bad, of_highest, 1.0f);",
    ),
    "the last of an odd number of keys is not there twice": ("if (count % 2 == 1) {", "if (false) {"),
    "the smallest key is that of every other row": ("pairs.FinishSmallest(smallest);", ""),
    "the largest key is that of every other row": ("pairs.FinishLargest(largest);", ""),
    "the rounding of every other key is not tested": ("pairs.FinishLargest(back);", ""),
    "a smallest key lies above 0": (
        "AscendC::Muls(number_, smallest, static_cast<half>(-1.0f), static_cast<int32_t>(width));",
        "AscendC::Muls(number_, largest, static_cast<half>(1.0f), static_cast<int32_t>(width));",
    ),
    "a frame far from an anchor is kept": (
        "AscendC::Mins(left_, left_, 1.0f, width, count, in_place);",
        "AscendC::Mins(left_, left_, 0.0f, width, count, in_place);",
    ),
    "a frame much shorter than an anchor is kept": ("AscendC::Min(back_, back_, length, width, count, with_row);", ""),
    "a frame comes back": (
        "math.Larger(left_[r * kFloats], left_[r * kFloats], r == 0 ? gone : left_[(r - 1) * kFloats]);",
        "math.AtLeast(left_[r * kFloats], left_[r * kFloats], 0.0f);",
    ),
    "a frame comes back after 128 blocks": ("math.Scale(gone, left_[(count - 1) * kFloats], 1.0f);", ""),
    "anchors are not less their frame": ("AscendC::Sub(wide_, wide_, back_, width, count, with_tile);", ""),
    "distances of anchors have the wrong sign": (
        "AscendC::Sub(wide_, wide_, back_, width, count, with_tile);",
        "AscendC::Sub(wide_, back_, wide_, width, count, with_tile);",
    ),
    "what an anchor subtracts is left out of the reference": (
        "all.Scale(Number(kNext), in[kHalfRows], unit);",
        "all.Set(Number(kNext), 0.0f);",
    ),
    "small products that add up are not ordered from nine fractals on": (
        "if (f.adds && f.m / kFractal * (f.n / kFractal) < kOrderedFractals)",
        "if (f.adds && f.m / kFractal * (f.n / kFractal) < kOrderedFractals - 1)",
    ),
    "a maximum is not carried into the next frame": (
        "seeing.Add(Number(0, kMaximum), Number(0, kMaximum), Number(kFirst));",
        "",
    ),
    "a log-sum-exp is in the first frame": (
        "seeing.Scale(Number(0, kFrame), Framed(slot), 1.0f);",
        "",
    ),
    "a row is carried into a frame of keys that it does not see": (
        "seeing.Subtract(Number(kFirst), Number(0, kFrame), Framed(slot));",
        "all.Subtract(Number(kFirst), Number(0, kFrame), Framed(slot)); seeing = all;",
    ),
    "rows that see no key of a block move the reference": (
        "all.Set(Number(kGap), 0.0f);",
        "all.Set(Number(kGap), kNothing);",
    ),
    "largest scores stay in the frame of their block": (
        "seeing.Add(Number(kBest), Number(kBest), Number(kFirst));",
        "",
    ),
    "largest scores lack the offset of their block": ("seeing.Add(here, here, Number(slot, kOffset));", ""),
    "the largest score is that of the last block": (
        "seeing.Larger(Number(kBest), Number(kBest), here);",
        "seeing.Scale(Number(kBest), here, 1.0f);",
    ),
    "largest scores lack their frame": (
        "all.Add(largest, Number(kBest), frame);",
        "all.Scale(largest, Number(kBest), 1.0f);",
    ),
    "a fully masked row has a largest score": ("never.SetBits(largest, kMinusInfinity);", ""),
    "a row that begins holds what it referred to": ("RowMath(now_ & ~seen_).Set(Number(0, kMaximum), kNothing);", ""),
    "a row's second tile does not refer to the guess of its first": (
        "RowMath(late_).Scale(Number(0, kMaximum), Number(other, kOffset), 1.0f);",
        "",
    ),
    "a guess stays in the frame of its block": ("RowMath(late_).Scale(Number(0, kFrame), Framed(other), 1.0f);", ""),
    "a row's first tile does not refer to its guess": ("RowMath(begin_).Scale(rho, p_.guess, 1.0f);", ""),
    "a reference is kept for rows that begin": ("if ((begin_ | late_) != 0)", "if (false)"),
    "the first block that a tile visits has no offset": (
        "all.Scale(Number(kNext), in[kHalfRows], has_offset ? unit : 0.0f);",
        "all.Set(Number(kNext), 0.0f);",
    ),
    "a row that is computed twice has no mask of its own": (
        "LoadMaskRows(to[kBlockKeys], mask[at], 1, count);",
        "",
    ),
    "a mask is not added": (ADDED, ""),
    "a mask that is loaded ahead is that of the tile before": (
        "LoadAddedMask(task, j + 1, rows);",
        "LoadAddedMask(task, j, rows);",
    ),
    "a row of a mask that all rows share is not repeated": (ADDED, ADDED.replace("stride)", "kTileBlocks)")),
    "a tile to which a mask is added is not kept in FP32": (
        "if (t_.adds_mask || reached * factor > kReach || reached >= kHalfLargest || factor > kCoarseUnit)",
        "if (reached * factor > kReach || reached >= kHalfLargest || factor > kCoarseUnit)",
    ),
    "a key behind the last is above what a mask adds": ("HideColumns(score_tile_, count, rows, kNothing);", ""),
    "a maximum with what a mask adds is in units of its tile": (
        "return t_.adds_mask ? 1.0f : factor_[slot];",
        "return factor_[slot];",
    ),
    "the second tile refers to the first one's guess where a mask is added": (
        "BeginReference(1, rows, Number(0, kOffset), factor_[1], begin, everyone, false);",
        """BeginReference(1, rows, Number(0, kOffset), factor_[1], SeeFirst(task, 1, rows, SeenRows(task, 0, rows)),
                          everyone, false);""",
    ),
    "tiles refer to a maximum with what a mask adds": ("begin_ = RowsBetween(0, rows);", ""),
    "hidden scores are counted": ("Hide(task, 0, block, rows, tile);", ""),
    "scores below a reference are not counted": (
        "rows_of_tile.Larger(most, above, below);",
        "rows_of_tile.Scale(most, above, 1.0f);",
    ),
    "scores before shifting lack their frame": ("rows_of_tile.Add(above, above, Number(0, kFrame));", ""),
    "scores before shifting lack their offset": ("rows_of_tile.Subtract(below, below, Number(slot, kOffset));", ""),
    "largest scores are counted unrounded": ("rows_of_tile.ToFloat(most, work_.ReinterpretCast<half>());", ""),
    "infinities are counted as 65504 too": (
        "RowMath(0, rows).Subtract(Count(kSaturated), Count(kSaturated), Count(kNotFinite));",
        "",
    ),
    "a row that drops almost nothing is flagged": ("all.Smaller(low_, low_, first);", ""),
    "the cosine of place 3 is not tested": ("all.Larger(low_, low_, cosine);", ""),
    "the sine of place 3 is not tested": ("all.Larger(high_, high_, sine);", ""),
    "sines are not tested": ("all.Larger(low_, low_, high_);", ""),
    "signs flag a row on one side only": (
        "for (const Row& wave : waves) all.Absolute(wave, wave);",
        "for (const Row& wave : waves) all.Scale(wave, wave, 1.0f);",
    ),
    "columns beyond the last are counted": ("if (columns < kFloats) {", "if (false) {"),
    "subnormal numbers are rounded stochastically": (
        "all.SetBits(normal, (t_.to_bf16 ? kBf16Normal : kHalfNormal) - moved_);",
        "all.SetBits(normal, 0 - moved_);",
    ),
    "numbers beyond the largest are rounded stochastically": (
        """AscendC::Adds(moved, moved, -static_cast<int32_t>(moved_), columns, rows_,
                      AscendC::UnaryRepeatParams(1, 1, kTileBlocks, kTileBlocks));""",
        """AscendC::Mins(Left(), Left(), t_.to_bf16 ? 0x1.fep127f : kHalfLargest, columns, rows_,
                         AscendC::UnaryRepeatParams(1, 1, kTileBlocks, kTileBlocks));
           AscendC::PipeBarrier<PIPE_V>();
           AscendC::Adds(moved, moved, -static_cast<int32_t>(moved_), columns, rows_,
                         AscendC::UnaryRepeatParams(1, 1, kTileBlocks, kTileBlocks));""",
    ),
    "all rows are rounded stochastically": (
        "all.SetBits(none, kMinusInfinityBits);",
        "all.SetBits(none, kHalfNormal - moved_);",
    ),
    "the hash lacks a round": ("Stir(15, kSecondFactor);", ""),
    "columns share their key": (
        "AscendC::Muls(keys, keys, kKeyStep, columns);",
        "AscendC::Muls(keys, keys, 0, columns);",
    ),
    "keys are even too": ("AscendC::Adds(keys, keys, 1, columns);", ""),
    "parts of the columns share their keys": ("MakeRandomNumbers(first + c, part);", "MakeRandomNumbers(0, part);"),
    "rows have no start": (
        "Spread(Starts(), high_, rows_, kTileBlocks);",
        "Spread(Starts(), Scratch(4), rows_, kTileBlocks);",
    ),
    "low halves of numbers are not added up": ("sum.Halves();", ""),
    "random bits are other bits of the hash": (
        "ShiftLeft(Left(), Left(), 24 - dropped_, columns);",
        "ShiftLeft(Left(), Left(), 23 - dropped_, columns);",
    ),
    "dropped bits are not cleared": (
        "ShiftLeft(Left(), Left(), dropped_, columns);",
        "ShiftLeft(Left(), Left(), 0, columns);",
    ),
    "a column stays in a frame that is far from a key": ("AscendC::Sub(frame, frame, far, n);", ""),
    "keys above a frame are not tested": (
        "AscendC::Max(far, far, low, n);",
        "AscendC::Maxs(far, low, 0.0f, n);",
    ),
    "keys below a frame are not tested": ("AscendC::Max(far, far, low, n);", ""),
    "a maximum is not carried where columns leave a frame": ("all.Add(maximum, maximum, Number(kCarry));", ""),
    "a frame is carried again and again": (
        "AscendC::Sub(Columns(kFrame), Columns(kFrame), Columns(kMoved), a_.dim);",
        "",
    ),
    "parts are not brought into a common frame": ("if (FindMove(part.frame, true))", "if (false)"),
    "the common frame is that of the first part above 0": ("AscendC::Min(above, above, to_above, dim_);", ""),
    "the common frame is that of the first part below 0": ("AscendC::Max(below, below, to_below, dim_);", ""),
    "parts are not weighed": ("all.Exponential(other, other);", "all.Set(other, 1.0f);"),
    "sums of parts are not weighed": ("all.Multiply(sum, sum, other);", ""),
    "weights are not lifted": ("AscendC::Muls(tile_, tile_, kDecodeLift, rows * kBlockKeys);", ""),
    "a decoded maximum falls": ("all.Larger(next, Number(kTop), maximum);", "all.Scale(next, Number(kTop), 1.0f);"),
    "keys beyond a token's last have weight": ("if (kept < kBlockKeys)", "if (false)"),
    "keys beyond the last have weight": ("if (!partial)", "if (false)"),
    "tokens that see no key keep the result of masked keys": (
        "AscendC::Duplicate(o_, 0.0f, without_keys * a_.dim);",
        "",
    ),
    "sinks are counted from the vector core's first row": (
        "RowMath(r, r + 1).Set(Number(kSink), sinks_.GetValue(item.head * t_.group + (skipped_ + r) % t_.group));",
        "RowMath(r, r + 1).Set(Number(kSink), sinks_.GetValue(item.head * t_.group + r % t_.group));",
    ),
    "tokens of a sequence in pages are aligned to the end of its table": (
        "shift_ = static_cast<int64_t>(t_.has_table || t_.has_starts ? keys_ : a_.keys) - tokens_;",
        "shift_ = static_cast<int64_t>(t_.has_starts && !t_.has_table ? keys_ : a_.keys) - tokens_;",
    ),
    "decoded keys of a packed sequence are the first ones": ("item_.first_key = keys.first;", ""),
    "a packed sequence has a batch entry": ("item_.page = HasPackedKeys() ? 0 : sequence;", "item_.page = sequence;"),
    "decoded rows see the keys of all packed sequences": ("keys_ = keys.rows;", ""),
    "packed rows are aligned to the end of all keys": (
        "task.shift = static_cast<int64_t>(keys.rows) - queries.rows;",
        "",
    ),
    "tiles of a packed sequence are counted from the first sequence": (
        "lane.first_row = ((slot - queries.place) * tiling_.lanes + i) * tiling_.tile_rows;",
        "lane.first_row = (slot * tiling_.lanes + i) * tiling_.tile_rows;",
    ),
    "rows behind the last packed sequence see keys": (
        "keys = task.padding ? Span() : keys_.Of(sequence);",
        "keys = keys_.Of(sequence);",
    ),
    "rows behind the last packed sequence have a sink": (
        "if (t_.has_sinks && !task.padding)",
        "if (t_.has_sinks)",
    ),
    "queries of a packed sequence are the first ones": (
        "task.query_row = static_cast<uint64_t>(task.head) * tiling_.rows + queries.first;",
        "task.query_row = static_cast<uint64_t>(task.head) * tiling_.rows;",
    ),
    "keys of a packed sequence are the first ones": (
        "task.key_row = static_cast<uint64_t>(task.kv_head) * tiling_.keys + keys.first;",
        "task.key_row = static_cast<uint64_t>(task.kv_head) * tiling_.keys;",
    ),
    "anchors of a packed sequence are the first ones": (
        "task.key_block = static_cast<uint64_t>(task.kv_head) * tiling_.blocks + keys.place;",
        "task.key_block = static_cast<uint64_t>(task.kv_head) * tiling_.blocks;",
    ),
    "the first piece of a packed sequence belongs to the one before": (
        "if (Place(middle) <= place)",
        "if (Place(middle) < place)",
    ),
    "packed lengths may end behind the last row": (
        "return Clamped(starts_.GetValue(sequence), rows_);",
        "return static_cast<uint32_t>(starts_.GetValue(sequence));",
    ),
    "packed lengths may decrease": (
        "span.rows = end > span.first ? end - span.first : 0;",
        "span.rows = end - span.first;",
    ),
    "frames are those of the first packed sequence alone": (
        "StoreFrames(head, KeysOf(head, item / parts % sequences), item % parts * kFloats);",
        "StoreFrames(head, KeysOf(head, 0), item % parts * kFloats);",
    ),
    "only the first packed sequence has a mean above its anchor": (
        "if (begins)",
        "if (place == 0)",
    ),
    "page numbers are not clamped": (
        "page = Clamped(table_.GetValue(uint64_t{item.sequence} * columns_ + index), pages_ - 1);",
        "page = table_.GetValue(uint64_t{item.sequence} * columns_ + index);",
    ),
    "the overflow mode is not set": (
        "AscendC::SetSaturationFlag<AscendC::SaturationMode::FLOAT>(saturates);",
        "",
    ),
    "the overflow mode is not restored": (
        "AscendC::SetSaturationFlag<AscendC::SaturationMode::FLOAT>(before_);",
        "",
    ),
}
SWITCH = """
inline int pasa_mutant = 0;
// By a thirty-second, in blocks of 32 bytes.
inline uint32_t pasa_shrunk(uint64_t bytes, int mutant)
{
    const uint64_t less = (bytes / 32 + 31) / 32 * 32;
    return static_cast<uint32_t>(pasa_mutant == mutant ? bytes - (less < 32 ? 32 : less) : bytes);
}
"""


@dataclass(frozen=True)
class Mutant:
    """Describe a change of the kernels, and its place."""

    number: int
    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.what}"


def chosen(right: str, wrong: str, number: int) -> str:
    """Return code that runs `wrong` in the mutant, and `right` otherwise; a condition keeps its block."""
    if right.startswith("if ("):
        condition, rest = right[4:].split(")", 1) if "{" in right else (right[4:-1], "")
        replaced = wrong[4:].rpartition(")")[0]
        return f"if (pasa_mutant == {number} ? {replaced} : ({condition})){rest}"
    return f"if (pasa_mutant == {number}) {{ {wrong} }} else {{ {right} }}"


def tried_now(mutants: list[Mutant]) -> list[Mutant]:
    """Return every tenth mutant, or all of them for `scripts/test.sh --all`, which sets PASA_ALL_MUTANTS."""
    return mutants if os.environ.get("PASA_ALL_MUTANTS") else mutants[::10]


def write_mutants(folder: Path, sources: str = "*.h", rules: dict[str, tuple[str, str]] = RULES) -> list[Mutant]:
    """Write the kernels into `folder`/kernel, with a switch at every place of some `sources` that has a mutant.

    Raises
    ------
    ValueError
        If a statement of `rules` is in none of these sources.
    """
    mutants: list[Mutant] = []
    folder.mkdir(parents=True)
    for name in ("twin", "tiling"):
        (folder / name).symlink_to(ASCEND_C / name)
    for name in ("binding", "kernel"):  # the includes of the binding are to find the kernels of `folder`
        shutil.copytree(ASCEND_C / name, folder / name)
    with open(folder / "kernel" / "port.h", "a", encoding="utf-8") as port:
        port.write(SWITCH)
    for source in sorted(path for pattern in sources.split() for path in (ASCEND_C / "kernel").glob(pattern)):
        text = source.read_text(encoding="utf-8")

        def note(match: re.Match[str], what: str, name: str = source.name, text: str = text) -> int:
            mutants.append(Mutant(len(mutants) + 1, name, text.count("\n", 0, match.start()) + 1, what))
            return len(mutants)

        def leave_out(match: re.Match[str], note=note) -> str:
            return f"if (pasa_mutant != {note(match, 'without ' + match[1])}) {match[0]}"

        def shrink(match: re.Match[str], note=note) -> str:
            what = "smaller " + match[1].split("(")[1].split(",")[0]
            return f"{match[1]}pasa_shrunk({match[2]}, {note(match, what)}));"

        changed = BUFFER.sub(shrink, CALL.sub(leave_out, text))
        for what, (right, wrong) in rules.items():
            if right not in text:
                continue
            mutants.append(Mutant(len(mutants) + 1, source.name, text.count("\n", 0, text.index(right)) + 1, what))
            changed = changed.replace(right, chosen(right, wrong, len(mutants)), 1)
        if source.name != "port.h":
            (folder / "kernel" / source.relative_to(ASCEND_C / "kernel")).write_text(changed, encoding="utf-8")
    if missing := rules.keys() - {mutant.what for mutant in mutants}:
        raise ValueError(f"no kernel has the statements of: {sorted(missing)}")
    return mutants
