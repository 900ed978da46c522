// Arithmetic on the columns of a block of keys: their means and anchors, and what FP16 would round of their differences.
#pragma once

#include "rows.h"

namespace pasa {

constexpr uint16_t kExponentBits = 0x7c00;       // of FP16
constexpr float kMantissaStep = 0x1p-10f;        // an ulp of FP16, over the number's power of two
constexpr float kSmallestHalf = 0x1p-24f;        // the finest grid there is
constexpr float kSmallestResidue = 0x1p24f;      // over it: differences of FP16 numbers are multiples of it

// FP32 keys (count, width), 64 numbers a row, and numbers of their columns.
class KeyColumns {
public:
    using Row = AscendC::LocalTensor<float>;
    __aicore__ inline explicit KeyColumns(AscendC::TPipe& pipe)
    {
        const uint32_t numbers = kBlockKeys * kFloats;
        pipe.InitBuffer(wide_buffer_, numbers * sizeof(float));
        pipe.InitBuffer(left_buffer_, numbers * sizeof(float));
        pipe.InitBuffer(back_buffer_, numbers * sizeof(float));
        pipe.InitBuffer(half_buffer_, numbers * sizeof(half));
        pipe.InitBuffer(columns_buffer_, kColumns * kFloats * sizeof(float));
        pipe.InitBuffer(bits_buffer_, 2 * kFloats * sizeof(half));
        wide_ = wide_buffer_.Get<float>();
        left_ = left_buffer_.Get<float>();
        back_ = back_buffer_.Get<float>();
        half_ = half_buffer_.Get<half>();
        columns_ = columns_buffer_.Get<float>();
    }

    __aicore__ inline Row Mean() const { return Columns(kMean); }
    __aicore__ inline Row Anchor() const { return Columns(kAnchor); }
    // What the anchor leaves of the mean, as far as FP16 reaches.
    __aicore__ inline Row Residual(RowMath& math)
    {
        math.Subtract(Columns(kScratch), Mean(), Anchor());
        math.Clamp(Columns(kScratch), Columns(kScratch), kHalfLargest);
        return Columns(kScratch);
    }

    // Before the first columns of a block.
    __aicore__ inline void Begin() { RowMath(0, kFloats).Set(Columns(kUnfit), 0.0f); }

    __aicore__ inline void Take(const AscendC::LocalTensor<half>& keys, uint32_t width, uint32_t count)
    {
        AscendC::Cast(wide_, keys, AscendC::RoundMode::CAST_NONE, width, count, AscendC::UnaryRepeatParams(1, 1, 8, 4));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // The mean on the grid of the column's largest key, or 0 where the difference to some key would be rounded.
    __aicore__ inline void FindAnchor(uint32_t width, uint32_t count)
    {
        RowMath math(0, width);
        const Row mean = Columns(kMean), grid = Columns(kGrid), anchor = Columns(kAnchor), bad = Columns(kBad);
        const Row scratch = Columns(kScratch);
        Keep(width, count);
        Fold<true>(width, count);
        math.Set(scratch, static_cast<float>(count));
        math.Divide(mean, left_, scratch);
        Keep(width, count);
        LargestOfColumns(scratch, width, count);
        PowerOfTwo(grid, scratch, math);
        math.Scale(grid, grid, kMantissaStep);
        math.AtLeast(grid, grid, kSmallestHalf);
        math.Divide(anchor, mean, grid);
        math.Round(anchor, anchor);
        math.Multiply(anchor, anchor, grid);
        TakeOff(anchor, width, count);
        RoundingOf(width, count);
        LargestOfColumns(bad, width, count);
        TakeOff(anchor, width, count);
        // and what FP32 lost in the difference: 2^-24 - 60000 is -60000 there, an FP16 number
        AscendC::Add(left_, left_, anchor, width, count, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 0));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(left_, left_, wide_, width, count, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
        AscendC::PipeBarrier<PIPE_V>();
        LargestOfColumns(scratch, width, count);
        math.Larger(bad, bad, scratch);
        math.Scale(bad, bad, kSmallestResidue);
        math.AtMost(bad, bad, 1.0f);  // 1 where an anchor must go, 0 elsewhere
        math.Multiply(scratch, bad, anchor);
        math.Subtract(anchor, anchor, scratch);
    }

    // Which columns of K - anchor the unit would round, into kUnfit.
    __aicore__ inline void TestUnit(float unit, uint32_t width, uint32_t count)
    {
        TakeOff(Columns(kAnchor), width, count);
        AscendC::Muls(left_, left_, unit, width, count, AscendC::UnaryRepeatParams(1, 1, 8, 8));
        AscendC::PipeBarrier<PIPE_V>();
        RoundingOf(width, count);
        RowMath math(0, width);
        LargestOfColumns(Columns(kScratch), width, count);
        math.Larger(Columns(kUnfit), Columns(kUnfit), Columns(kScratch));
    }

    // Whether the unit would round some column of the block.
    __aicore__ inline bool Unfit() { return Extreme<AscendC::ReduceType::MAX>(Columns(kUnfit), Columns(kScratch)) > 0.0f; }

    // (K - anchor) unit to FP16.
    __aicore__ inline void Shift(const AscendC::LocalTensor<half>& to, const Row& anchor, float unit, uint32_t width,
                                 uint32_t count)
    {
        TakeOff(anchor, width, count);
        AscendC::Muls(left_, left_, unit, width, count, AscendC::UnaryRepeatParams(1, 1, 8, 8));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(to, left_, AscendC::RoundMode::CAST_RINT, width, count, AscendC::UnaryRepeatParams(1, 1, 4, 8));
    }

    // What FP16 makes of a row.
    __aicore__ inline void Rounded(const Row& row, RowMath& math)
    {
        math.ToHalf(bits_buffer_.Get<half>(), row);
        math.ToFloat(row, bits_buffer_.Get<half>());
    }

private:
    enum Column { kMean, kGrid, kAnchor, kBad, kUnfit, kScratch, kColumns };

    __aicore__ inline Row Columns(Column which) const { return columns_[which * kFloats]; }

    // The sum or the largest of each column of left_ to its first row, pairwise; the tile is lost.
    template <bool kSum>
    __aicore__ inline void Fold(uint32_t width, uint32_t rows)
    {
        while (rows > 1) {
            const uint32_t half_rows = rows / 2;
            const Row lower = left_[(rows - half_rows) * kFloats];
            const AscendC::BinaryRepeatParams p(1, 1, 1, 8, 8, 8);
            kSum ? AscendC::Add(left_, left_, lower, width, half_rows, p)
                 : AscendC::Max(left_, left_, lower, width, half_rows, p);
            AscendC::PipeBarrier<PIPE_V>();
            rows -= half_rows;
        }
    }

    // left_ = wide_ - the columns' anchor.
    __aicore__ inline void TakeOff(const Row& anchor, uint32_t width, uint32_t count)
    {
        AscendC::Sub(left_, wide_, anchor, width, count, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 0));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // left_ = |left_|, largest of each column to `to`.
    __aicore__ inline void LargestOfColumns(const Row& to, uint32_t width, uint32_t count)
    {
        AscendC::Abs(left_, left_, width, count, AscendC::UnaryRepeatParams(1, 1, 8, 8));
        AscendC::PipeBarrier<PIPE_V>();
        Fold<false>(width, count);
        RowMath(0, width).Scale(to, left_, 1.0f);
    }

    // left_ = what rounding it to FP16 changes.
    __aicore__ inline void RoundingOf(uint32_t width, uint32_t count)
    {
        AscendC::Cast(half_, left_, AscendC::RoundMode::CAST_RINT, width, count,
                      AscendC::UnaryRepeatParams(1, 1, 4, 8));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(back_, half_, AscendC::RoundMode::CAST_NONE, width, count,
                      AscendC::UnaryRepeatParams(1, 1, 8, 4));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sub(left_, back_, left_, width, count, AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // left_ = wide_.
    __aicore__ inline void Keep(uint32_t width, uint32_t count)
    {
        AscendC::Adds(left_, wide_, 0.0f, width, count, AscendC::UnaryRepeatParams(1, 1, 8, 8));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // The power of two in FP16 numbers held in FP32: their exponent bits alone; 0 for a subnormal.
    __aicore__ inline void PowerOfTwo(const Row& to, const Row& from, RowMath& math)
    {
        const AscendC::LocalTensor<half> number = bits_buffer_.Get<half>();
        const AscendC::LocalTensor<uint16_t> bits = number.ReinterpretCast<uint16_t>();
        AscendC::Duplicate(number, static_cast<half>(0.0f), kFloats);
        AscendC::Duplicate(bits[kFloats], kExponentBits, static_cast<int32_t>(kFloats));
        AscendC::PipeBarrier<PIPE_V>();
        math.ToHalf(number, from);
        AscendC::And(bits, bits, bits[kFloats], static_cast<int32_t>(kFloats));
        AscendC::PipeBarrier<PIPE_V>();
        math.ToFloat(to, number);
    }

    AscendC::TBuf<AscendC::TPosition::VECCALC> wide_buffer_, left_buffer_, back_buffer_, half_buffer_, columns_buffer_,
        bits_buffer_;
    AscendC::LocalTensor<float> wide_, left_, back_, columns_;
    AscendC::LocalTensor<half> half_;
};

}  // namespace pasa
