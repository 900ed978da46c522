// Arithmetic on the columns of a block of keys: their means and anchors, and what FP16 rounds of their differences.
#pragma once

#include "rows.h"

namespace pasa {

constexpr uint16_t kExponentBits = 0x7c00;       // of FP16
constexpr float kMantissaStep = 0x1p-10f;        // an ulp of FP16, over the number's power of two
constexpr float kSmallestHalf = 0x1p-24f;        // the finest grid there is
constexpr float kLargestInverse = 0x1p-15f;      // the smallest power of two whose inverse FP16 holds
constexpr float kSmallestResidue = 0x1p24f;      // over it: differences of FP16 numbers are multiples of it

// A block of keys, 64 columns at a time as FP32 (count, 64), and numbers of those columns.
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
        wide_ = wide_buffer_.Get<float>();
        left_ = left_buffer_.Get<float>();
        back_ = back_buffer_.Get<float>();
        columns_ = columns_buffer_.Get<float>();
        number_ = bits_buffer_.Get<half>();
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
    // the column's largest key, or 0 where the difference to some key would be rounded, or a key is less than a third of
    // it. `Chip` rounds to the nearest integers, half to even; they are below 2^22, by far.
    template <typename Chip>
    __aicore__ inline void TakeAnchorOff(const HalfTile& to, uint32_t dim, const HalfTile& keys, uint32_t width,
                                         uint32_t count)
    {
        AscendC::Cast(wide_, keys, AscendC::RoundMode::CAST_NONE, width, count, AscendC::UnaryRepeatParams(1, 1, 8, 4));
        AscendC::PipeBarrier<PIPE_V>();
        FindMeanAndGrid(width, count);
        RowMath math(0, width);
        const Row anchor = Columns(kAnchor), bad = Columns(kScratch);
        math.Divide(anchor, Mean(), Columns(kGrid));
        AscendC::PipeBarrier<PIPE_V>();
        Chip::ToIntegers(anchor, width);
        AscendC::PipeBarrier<PIPE_V>();
        math.Multiply(anchor, anchor, Columns(kGrid));
        AscendC::PipeBarrier<PIPE_V>();
        Difference(to, dim, width, count);
        // Back to K: where the sum is not K, the difference was rounded, by FP16 or already by FP32 (2^-24 - 60000).
        // Where it is K, nothing was: an error would be a multiple of K's ulp in FP16, which FP32 keeps beside K.
        AscendC::Cast(back_, to, AscendC::RoundMode::CAST_NONE, width, count,
                      AscendC::UnaryRepeatParams(1, 1, 8, dim / kFractal));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(back_, back_, anchor, width, count, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 0));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(back_, back_, wide_, width, count, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Abs(back_, back_, width, count, AscendC::UnaryRepeatParams(1, 1, 8, 8));
        // A key is less than a third of the anchor where a (3 k - a) < 0. That is a multiple of 2^-48.
        AscendC::Add(left_, left_, wide_, width, count, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
        math.Scale(bad, anchor, -kSmallestResidue);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(left_, left_, wide_, width, count, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Mul(left_, left_, bad, width, count, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 0));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Max(back_, back_, left_, width, count, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
        AscendC::PipeBarrier<PIPE_V>();
        Fold<false>(width, count);
        math.Scale(bad, back_, kSmallestResidue);
        AscendC::PipeBarrier<PIPE_V>();
        math.AtMost(bad, bad, 1.0f);  // 1 where an anchor must go, 0 elsewhere
        AscendC::PipeBarrier<PIPE_V>();
        math.Multiply(bad, bad, anchor);
        AscendC::PipeBarrier<PIPE_V>();
        math.Subtract(anchor, anchor, bad);
        AscendC::PipeBarrier<PIPE_V>();
        Difference(to, dim, width, count);
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
    enum Column { kMean, kGrid, kAnchor, kScratch, kColumns };
    static constexpr uint32_t kTrial = kBlockKeys * kFloats * sizeof(float) / sizeof(half);  // numbers in left_

    __aicore__ inline void Take(const HalfTile& to, const Row& from, uint32_t width, uint32_t count)
    {
        AscendC::Cast(to, from, AscendC::RoundMode::CAST_NONE, width, count,
                      AscendC::UnaryRepeatParams(1, 1, width / kFractal, 8));
    }

    __aicore__ inline Row Columns(Column which) const { return columns_[which * kFloats]; }

    // Means of the columns of wide_, and an ulp of the largest key of each.
    __aicore__ inline void FindMeanAndGrid(uint32_t width, uint32_t count)
    {
        RowMath math(0, width);
        const Row grid = Columns(kGrid);
        AscendC::Adds(left_, wide_, 0.0f, width, count, AscendC::UnaryRepeatParams(1, 1, 8, 8));
        AscendC::Abs(back_, wide_, width, count, AscendC::UnaryRepeatParams(1, 1, 8, 8));
        math.Set(grid, static_cast<float>(count));
        AscendC::PipeBarrier<PIPE_V>();
        Fold<true>(width, count);
        math.Divide(Mean(), left_, grid);
        math.ToHalf(number_, back_);
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

    // The largest of each column of back_ to its first row, pairwise, and with it the sums of left_; both are lost.
    template <bool kSums>
    __aicore__ inline void Fold(uint32_t width, uint32_t rows)
    {
        const AscendC::BinaryRepeatParams p(1, 1, 1, 8, 8, 8);
        while (rows > 1) {
            const uint32_t half_rows = rows / 2, lower = (rows - half_rows) * kFloats;
            if (kSums) AscendC::Add(left_, left_, left_[lower], width, half_rows, p);
            AscendC::Max(back_, back_, back_[lower], width, half_rows, p);
            AscendC::PipeBarrier<PIPE_V>();
            rows -= half_rows;
        }
    }

    __aicore__ inline void Difference(const HalfTile& to, uint32_t dim, uint32_t width, uint32_t count)
    {
        AscendC::Sub(left_, wide_, Anchor(), width, count, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 0));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(to, left_, AscendC::RoundMode::CAST_NONE, width, count,
                      AscendC::UnaryRepeatParams(1, 1, dim / kFractal, 8));
        AscendC::PipeBarrier<PIPE_V>();
    }

    AscendC::TBuf<AscendC::TPosition::VECCALC> wide_buffer_, left_buffer_, back_buffer_, columns_buffer_, bits_buffer_;
    AscendC::LocalTensor<float> wide_, left_, back_, columns_;
    HalfTile number_;  // FP16 numbers of 64 columns; behind them what leaves their exponents
};

}  // namespace pasa
