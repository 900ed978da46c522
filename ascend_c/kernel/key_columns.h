// Arithmetic on the columns of a block of keys: their means and anchors, and what FP16 rounds of their differences.
#pragma once

#include "rows.h"

namespace pasa {

constexpr uint16_t kExponentBits = 0x7c00;       // of FP16
constexpr float kMantissaStep = 0x1p-10f;        // an ulp of FP16, over the number's power of two
constexpr float kSmallestHalf = 0x1p-24f;        // the finest grid there is
constexpr float kLargestInverse = 0x1p-15f;      // the smallest power of two whose inverse FP16 holds
constexpr float kSmallestResidue = 0x1p24f;      // over it: differences of FP16 numbers are multiples of it

// FP16 rows of 64 columns, two of them a repeat. An odd number of rows needs its last row once more behind it.
class RowPairs {
public:
    using HalfTile = AscendC::LocalTensor<half>;

    __aicore__ inline RowPairs(uint32_t width, uint32_t count) : width_(width), repeats_((count + 1) / 2)
    {
        mask_[0] = mask_[1] = width >= kFloats ? ~uint64_t{0} : (uint64_t{1} << width) - 1;
    }

    // `row`: 128 numbers, the same 64 twice.
    __aicore__ inline void SubtractRow(const HalfTile& to, const HalfTile& from, const HalfTile& row)
    {
        AscendC::Sub(to, from, row, mask_, repeats_, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 0));
    }
    __aicore__ inline void AddRow(const HalfTile& to, const HalfTile& row)
    {
        AscendC::Add(to, to, row, mask_, repeats_, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 0));
    }
    __aicore__ inline void Subtract(const HalfTile& to, const HalfTile& other)
    {
        AscendC::Sub(to, to, other, mask_, repeats_, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
    }
    __aicore__ inline void Absolute(const HalfTile& to)
    {
        AscendC::Abs(to, to, mask_, repeats_, AscendC::UnaryRepeatParams(1, 1, 8, 8));
    }

    // Half as many repeats: the largest numbers of both halves of `from`, and the smallest ones. A middle one, of an
    // odd number of repeats, is compared with itself.
    __aicore__ inline void BeginFold(const HalfTile& largest, const HalfTile& smallest, const HalfTile& from)
    {
        const uint32_t kept = (repeats_ + 1) / 2;
        const HalfTile other = from[(repeats_ - kept) * kHalves];
        AscendC::Max(largest, from, other, mask_, kept, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
        AscendC::Min(smallest, from, other, mask_, kept, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
        repeats_ = kept;
    }
    // The same in place. A middle repeat stays.
    __aicore__ inline void Fold(const HalfTile& largest, const HalfTile& smallest)
    {
        const uint32_t folded = repeats_ / 2;
        FoldLargest(largest);
        if (folded > 0) {
            AscendC::Min(smallest, smallest, smallest[repeats_ * kHalves], mask_, folded,
                         AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
        }
    }
    __aicore__ inline void FoldLargest(const HalfTile& largest)
    {
        const uint32_t folded = repeats_ / 2;
        repeats_ -= folded;
        if (folded > 0) {
            AscendC::Max(largest, largest, largest[repeats_ * kHalves], mask_, folded,
                         AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
        }
    }
    __aicore__ inline bool IsFolded() const { return repeats_ == 1; }
    // The two rows of the last repeat.
    __aicore__ inline void FinishLargest(const HalfTile& largest)
    {
        AscendC::Max(largest, largest, largest[kFloats], width_, 1, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
    }
    __aicore__ inline void FinishSmallest(const HalfTile& smallest)
    {
        AscendC::Min(smallest, smallest, smallest[kFloats], width_, 1, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
    }

private:
    uint64_t mask_[2];
    uint32_t width_, repeats_;
};

// A block of keys, 64 columns at a time, and numbers of those columns.
class KeyColumns {
public:
    using Row = AscendC::LocalTensor<float>;
    using HalfTile = AscendC::LocalTensor<half>;

    __aicore__ inline explicit KeyColumns(AscendC::TPipe& pipe)
    {
        const uint32_t numbers = kBlockKeys * kFloats;
        pipe.InitBuffer(wide_buffer_, numbers * sizeof(float));
        pipe.InitBuffer(left_buffer_, numbers * sizeof(float));
        pipe.InitBuffer(back_buffer_, numbers * sizeof(float));
        pipe.InitBuffer(columns_buffer_, kColumns * kFloats * sizeof(float));
        pipe.InitBuffer(bits_buffer_, 2 * kFloats * sizeof(half));
        pipe.InitBuffer(pair_buffer_, kHalves * sizeof(half));
        wide_ = wide_buffer_.Get<float>();
        left_ = left_buffer_.Get<float>();
        back_ = back_buffer_.Get<float>();
        columns_ = columns_buffer_.Get<float>();
        number_ = bits_buffer_.Get<half>();
        pair_ = pair_buffer_.Get<half>();
        AscendC::Duplicate(number_, static_cast<half>(0.0f), kFloats);
        AscendC::Duplicate(number_[kFloats].ReinterpretCast<uint16_t>(), kExponentBits, static_cast<int32_t>(kFloats));
    }

    __aicore__ inline Row Mean() const { return Columns(kMean); }
    __aicore__ inline Row Anchor() const { return Columns(kAnchor); }

    // What the anchor leaves of the mean. Of finite keys FP16 holds both: the mean itself, or half a step of the grid.
    __aicore__ inline Row Residual(RowMath& math)
    {
        const Row residual = Columns(kScratch);
        math.Subtract(residual, Mean(), Anchor());
        AscendC::PipeBarrier<PIPE_V>();
        return residual;
    }

    // K - anchor to columns of `to`, whose rows are `dim` long, without rounding: the anchor is the mean on the grid of
    // the column's largest key, or 0 where the difference to some key would be rounded, or a key is less than a third
    // of it. `keys` is FP16 (count, 64); an odd number of rows gets one more. `Chip` rounds to the nearest integers,
    // half to even; they are below 2^22, by far.
    template <typename Chip>
    __aicore__ inline void TakeAnchorOff(const HalfTile& to, uint32_t dim, const HalfTile& keys, uint32_t width,
                                         uint32_t count)
    {
        if (count % 2 == 1) {
            AscendC::Adds(keys[count * kFloats], keys[(count - 1) * kFloats], static_cast<half>(0.0f), width, 1,
                          AscendC::UnaryRepeatParams(1, 1, 4, 4));
            AscendC::PipeBarrier<PIPE_V>();
        }
        FindMeanAndGrid(keys, width, count);
        RowMath math(0, width);
        const Row anchor = Columns(kAnchor), bad = Columns(kScratch);
        math.Divide(anchor, Mean(), Columns(kGrid));
        AscendC::PipeBarrier<PIPE_V>();
        Chip::ToIntegers(anchor, width);
        AscendC::PipeBarrier<PIPE_V>();
        math.Multiply(anchor, anchor, Columns(kGrid));
        AscendC::PipeBarrier<PIPE_V>();
        TestAnchor(keys, width, count);
        math.Scale(bad, bad, kSmallestResidue);
        AscendC::PipeBarrier<PIPE_V>();
        math.AtMost(bad, bad, 1.0f);  // 1 where an anchor must go, 0 elsewhere
        AscendC::PipeBarrier<PIPE_V>();
        math.Multiply(bad, bad, anchor);
        AscendC::PipeBarrier<PIPE_V>();
        math.Subtract(anchor, anchor, bad);
        AscendC::PipeBarrier<PIPE_V>();
        math.ToHalf(pair_, anchor);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(to, keys, pair_, width, count, AscendC::BinaryRepeatParams(1, 1, 1, dim / kFractal, 4, 0));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Begin with the frames of blocks: that of the first is its anchor, an FP16 row.
    __aicore__ inline void BeginFrames(const HalfTile& anchor, RowMath& math)
    {
        math.ToFloat(Anchor(), anchor);
        math.Set(Columns(kScratch), 0.0f);
        AscendC::PipeBarrier<PIPE_V>();
        math.Absolute(Mean(), Anchor());
    }

    // Frames of the next `count` blocks from their anchors, FP16 (count, 64): the first anchor up to the block whose
    // own is further from it than one of both is from 0, and 0 from there on, column by column.
    __aicore__ inline void FindFrames(const HalfTile& anchors, uint32_t width, uint32_t count)
    {
        const Row first = Anchor(), length = Mean(), gone = Columns(kScratch);
        const AscendC::BinaryRepeatParams with_row(1, 1, 1, 8, 8, 0), with_tile(1, 1, 1, 8, 8, 8);
        const AscendC::UnaryRepeatParams in_place(1, 1, 8, 8);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(wide_, anchors, AscendC::RoundMode::CAST_NONE, width, count,
                      AscendC::UnaryRepeatParams(1, 1, 8, 4));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(left_, wide_, first, width, count, with_row);
        AscendC::Abs(back_, wide_, width, count, in_place);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Abs(left_, left_, width, count, in_place);
        AscendC::Min(back_, back_, length, width, count, with_row);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(left_, left_, back_, width, count, with_tile);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(left_, left_, kSmallestResidue, width, count, in_place);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mins(left_, left_, 1.0f, width, count, in_place);  // 1 where a block leaves the frame
        AscendC::PipeBarrier<PIPE_V>();
        RowMath math(0, width);
        for (uint32_t r = 0; r < count; ++r) {  // and in all blocks behind it
            math.Larger(left_[r * kFloats], left_[r * kFloats], r == 0 ? gone : left_[(r - 1) * kFloats]);
            AscendC::PipeBarrier<PIPE_V>();
        }
        math.Scale(gone, left_[(count - 1) * kFloats], 1.0f);
        AscendC::Mul(back_, left_, first, width, count, with_row);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(back_, first, back_, width, count, AscendC::BinaryRepeatParams(1, 1, 1, 8, 0, 8));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(wide_, wide_, back_, width, count, with_tile);  // taken last, behind a wait for the frames' copy
    }

    // The frames, and what they leave of the blocks' anchors: FP16 numbers, to (count, width).
    __aicore__ inline void TakeFrames(const HalfTile& to, uint32_t width, uint32_t count)
    {
        Take(to, back_, width, count);
    }
    __aicore__ inline void TakeDistances(const HalfTile& to, uint32_t width, uint32_t count)
    {
        Take(to, wide_, width, count);
    }

    // Whether `unit`, a power of two, would round one of so many FP16 differences.
    __aicore__ inline bool Rounds(float unit, const HalfTile& differences, uint32_t total)
    {
        if (unit < kSmallestHalf) return true;
        const HalfTile trial = left_.ReinterpretCast<half>();
        const float once = unit < kLargestInverse ? kLargestInverse : unit;  // 1 / once is an FP16 number
        float largest = 0.0f;
        for (uint32_t first = 0; first < total; first += kTrial) {
            uint32_t count = Least(kTrial, total - first);
            AscendC::Muls(trial, differences[first], ToHalf(unit), count);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Muls(trial, trial, ToHalf(1.0f / once), count);
            AscendC::PipeBarrier<PIPE_V>();
            if (once > unit) {
                AscendC::Muls(trial, trial, ToHalf(once / unit), count);
                AscendC::PipeBarrier<PIPE_V>();
            }
            AscendC::Sub(trial, trial, differences[first], count);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Abs(trial, trial, count);
            AscendC::PipeBarrier<PIPE_V>();
            while (count > kHalves) {
                const uint32_t part = count / 2 / kFractal * kFractal;
                AscendC::Max(trial, trial, trial[count - part], part);
                AscendC::PipeBarrier<PIPE_V>();
                count -= part;
            }
            const float here = Extreme<AscendC::ReduceType::MAX>(trial, count, number_);
            largest = here > largest ? here : largest;
        }
        return largest > 0.0f;
    }

private:
    enum Column { kMean, kGrid, kAnchor, kScratch, kLowest, kHighest, kOther, kColumns };
    static constexpr uint32_t kTrial = kBlockKeys * kFloats * sizeof(float) / sizeof(half);  // numbers in left_

    __aicore__ inline void Take(const HalfTile& to, const Row& from, uint32_t width, uint32_t count)
    {
        AscendC::Cast(to, from, AscendC::RoundMode::CAST_NONE, width, count,
                      AscendC::UnaryRepeatParams(1, 1, width / kFractal, 8));
    }

    __aicore__ inline Row Columns(Column which) const { return columns_[which * kFloats]; }

    // Means of the columns of `keys`, their largest and smallest keys, and an ulp of the key furthest from 0 of each.
    __aicore__ inline void FindMeanAndGrid(const HalfTile& keys, uint32_t width, uint32_t count)
    {
        RowMath math(0, width);
        RowPairs pairs(width, count);
        const Row grid = Columns(kGrid);
        const HalfTile largest = left_.ReinterpretCast<half>(), smallest = back_.ReinterpretCast<half>();
        AscendC::Cast(wide_, keys, AscendC::RoundMode::CAST_NONE, width, count, AscendC::UnaryRepeatParams(1, 1, 8, 4));
        pairs.BeginFold(largest, smallest, keys);
        math.Set(grid, static_cast<float>(count));
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t rows = count; rows > 1; rows = (rows + 1) / 2) {  // at least as often as pairs are folded
            AscendC::Add(wide_, wide_, wide_[(rows + 1) / 2 * kFloats], width, rows / 2,
                         AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
            pairs.Fold(largest, smallest);
            AscendC::PipeBarrier<PIPE_V>();
        }
        math.Divide(Mean(), wide_, grid);
        pairs.FinishLargest(largest);
        pairs.FinishSmallest(smallest);
        AscendC::PipeBarrier<PIPE_V>();
        math.ToFloat(Columns(kHighest), largest);
        math.ToFloat(Columns(kLowest), smallest);
        AscendC::Muls(number_, smallest, static_cast<half>(-1.0f), static_cast<int32_t>(width));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Max(number_, number_, largest, static_cast<int32_t>(width));
        AscendC::PipeBarrier<PIPE_V>();
        // The power of two in it: the exponent bits alone, 0 for a subnormal.
        const AscendC::LocalTensor<uint16_t> bits = number_.ReinterpretCast<uint16_t>();
        AscendC::And(bits, bits, bits[kFloats], static_cast<int32_t>(kFloats));
        AscendC::PipeBarrier<PIPE_V>();
        math.ToFloat(grid, number_);
        AscendC::PipeBarrier<PIPE_V>();
        math.Scale(grid, grid, kMantissaStep);
        AscendC::PipeBarrier<PIPE_V>();
        math.AtLeast(grid, grid, kSmallestHalf);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Above 0, to kScratch, where the anchor must go: there FP16 rounds K - a, or a (3 k - a) < 0 for the smallest or
    // the largest key, so that it is less than a third of a. Positive numbers are 2^-24 or more.
    __aicore__ inline void TestAnchor(const HalfTile& keys, uint32_t width, uint32_t count)
    {
        RowMath math(0, width);
        RowPairs pairs(width, count);
        const Row anchor = Columns(kAnchor), bad = Columns(kScratch), of_lowest = Columns(kGrid);
        const Row lowest = Columns(kLowest), highest = Columns(kHighest), of_highest = Columns(kOther);
        const HalfTile back = wide_.ReinterpretCast<half>();
        math.ToHalf(pair_, anchor);
        math.ToHalf(pair_[kFloats], anchor);
        math.Subtract(of_lowest, lowest, anchor);
        math.Subtract(of_highest, highest, anchor);
        math.Scale(bad, anchor, -kSmallestResidue);
        AscendC::PipeBarrier<PIPE_V>();
        pairs.SubtractRow(back, keys, pair_);
        math.Add(of_lowest, of_lowest, lowest);
        math.Add(of_highest, of_highest, highest);
        AscendC::PipeBarrier<PIPE_V>();
        // Back to K: where the sum is not K, the difference was rounded. Where it is K, nothing was: K, the anchor and
        // so an error are multiples of K's ulp, and K with an error of an ulp or more does not become K again.
        pairs.AddRow(back, pair_);
        math.Add(of_lowest, of_lowest, lowest);
        math.Add(of_highest, of_highest, highest);
        AscendC::PipeBarrier<PIPE_V>();
        pairs.Subtract(back, keys);
        math.Multiply(of_lowest, of_lowest, bad);
        math.Multiply(of_highest, of_highest, bad);
        AscendC::PipeBarrier<PIPE_V>();
        pairs.Absolute(back);
        math.Larger(bad, of_lowest, of_highest);
        AscendC::PipeBarrier<PIPE_V>();
        while (!pairs.IsFolded()) {
            pairs.FoldLargest(back);
            AscendC::PipeBarrier<PIPE_V>();
        }
        pairs.FinishLargest(back);
        AscendC::PipeBarrier<PIPE_V>();
        math.ToFloat(of_lowest, back);
        AscendC::PipeBarrier<PIPE_V>();
        math.Larger(bad, bad, of_lowest);
        AscendC::PipeBarrier<PIPE_V>();
    }

    AscendC::TBuf<AscendC::TPosition::VECCALC> wide_buffer_, left_buffer_, back_buffer_, columns_buffer_, bits_buffer_,
        pair_buffer_;
    AscendC::LocalTensor<float> wide_, left_, back_, columns_;
    HalfTile number_;  // FP16 numbers of 64 columns; behind them what leaves their exponents
    HalfTile pair_;    // FP16 anchors of 64 columns, twice
};

}  // namespace pasa
