// K' for the exact recovery, on the vector cores: an anchor for each column of a block, taken off without rounding.
#pragma once

#include "rows.h"
#include "task.h"

namespace pasa {

constexpr uint16_t kExponentBits = 0x7c00;       // of FP16
constexpr float kMantissaStep = 0x1p-10f;        // an ulp of FP16, over the number's power of two
constexpr float kSmallestHalf = 0x1p-24f;        // the finest grid there is
constexpr float kSmallestResidue = 0x1p24f;      // over it: differences of FP16 numbers are multiples of it

class ShiftExactly {
public:
    __aicore__ inline ShiftExactly(const ShiftArguments& arguments, const ShiftTiling& tiling, AscendC::TPipe& pipe)
        : t_(tiling)
    {
        k_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.k));
        keys_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.keys));
        anchors_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.anchors));
        units_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.units));
        if (t_.has_lengths) lengths_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(arguments.lengths));
        const uint32_t numbers = kBlockKeys * kFloats;
        pipe.InitBuffer(half_in_, 1, numbers * sizeof(half));
        pipe.InitBuffer(half_out_, 1, numbers * sizeof(half));
        pipe.InitBuffer(row_out_, 1, kFloats * sizeof(half));
        pipe.InitBuffer(unit_out_, 1, kBlockBytes);
        pipe.InitBuffer(column_out_, 1, kBlockKeys * kFractal * sizeof(half));
        pipe.InitBuffer(wide_buffer_, numbers * sizeof(float));
        pipe.InitBuffer(left_buffer_, numbers * sizeof(float));
        pipe.InitBuffer(back_buffer_, numbers * sizeof(float));
        pipe.InitBuffer(half_buffer_, numbers * sizeof(half));
        pipe.InitBuffer(columns_buffer_, kColumns * kFloats * sizeof(float));
        pipe.InitBuffer(anchors_buffer_, kMaxDim * sizeof(float));
        pipe.InitBuffer(bits_buffer_, 2 * kFloats * sizeof(half));
        wide_ = wide_buffer_.Get<float>();
        left_ = left_buffer_.Get<float>();
        back_ = back_buffer_.Get<float>();
        half_ = half_buffer_.Get<half>();
        columns_ = columns_buffer_.Get<float>();
        block_anchors_ = anchors_buffer_.Get<float>();
    }

    __aicore__ inline void Run()
    {
        const uint32_t total = t_.heads * t_.blocks;
        for (uint32_t item = AscendC::GetBlockIdx(); item < total; item += AscendC::GetBlockNum()) {
            if (Count(item) > 0) Shift(item / t_.blocks, item % t_.blocks, Count(item));
        }
        AscendC::SyncAll();
        for (uint32_t item = AscendC::GetBlockIdx(); item < total; item += AscendC::GetBlockNum()) {
            if (item % t_.blocks > 0 && Count(item) > 0) StoreDistance(item / t_.blocks, item % t_.blocks);
        }
    }

private:
    using Row = AscendC::LocalTensor<float>;
    enum Column { kMean, kGrid, kAnchor, kBad, kUnfit, kScratch, kColumns };

    __aicore__ inline Row Columns(Column which) const { return columns_[which * kFloats]; }

    // Keys of the item's block.
    __aicore__ inline uint32_t Count(uint32_t item)
    {
        const uint32_t batch = item / t_.blocks / t_.kv_heads, first = item % t_.blocks * kBlockKeys;
        const uint32_t keys = t_.has_lengths ? Clamped(lengths_.GetValue(batch), t_.keys) : t_.keys;
        return keys <= first ? 0 : Least(kBlockKeys, keys - first);
    }

    __aicore__ inline void Shift(uint32_t head, uint32_t block, uint32_t count)
    {
        RowMath(0, kFloats).Set(Columns(kUnfit), 0.0f);
        for (uint32_t first = 0; first < t_.dim; first += kFloats) {
            const uint32_t width = Least(kFloats, t_.dim - first);
            LoadColumns(head, block, first, width, count);
            FindAnchor(width, count);
            TestUnit(width, count);
            StoreAnchor(head, block, first, width);
            RowMath(0, width).Scale(block_anchors_[first], Columns(kAnchor), 1.0f);
        }
        const float unit = Largest(Columns(kUnfit)) > 0.0f ? 1.0f : t_.unit;
        for (uint32_t first = 0; first < t_.dim; first += kFloats) {
            const uint32_t width = Least(kFloats, t_.dim - first);
            if (t_.dim > kFloats) LoadColumns(head, block, first, width, count);  // otherwise they are still there
            StoreKeys(head, block, first, width, count, unit);
        }
        StoreReferenceColumns(head, block, count);
        StoreUnit(head, block, unit);
    }

    // FP32 keys (count, width) of a block to wide_, 64 numbers a row.
    __aicore__ inline void LoadColumns(uint32_t head, uint32_t block, uint32_t first, uint32_t width, uint32_t count)
    {
        AscendC::LocalTensor<half> in = half_in_.AllocTensor<half>();
        AscendC::DataCopyParams p;
        p.blockCount = count;
        p.blockLen = width / kFractal;
        p.srcGap = (t_.dim - width) / kFractal;
        p.dstGap = (kFloats - width) / kFractal;
        const uint64_t row = static_cast<uint64_t>(head) * t_.keys + block * kBlockKeys;
        AscendC::DataCopy(in, k_[row * t_.dim + first], p);
        half_in_.EnQue(in);
        in = half_in_.DeQue<half>();
        AscendC::Cast(wide_, in, AscendC::RoundMode::CAST_NONE, width, count, AscendC::UnaryRepeatParams(1, 1, 8, 4));
        AscendC::PipeBarrier<PIPE_V>();
        half_in_.FreeTensor(in);
    }

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

    // Which columns of K - anchor the unit would round, into kUnfit.
    __aicore__ inline void TestUnit(uint32_t width, uint32_t count)
    {
        TakeOff(Columns(kAnchor), width, count);
        AscendC::Muls(left_, left_, t_.unit, width, count, AscendC::UnaryRepeatParams(1, 1, 8, 8));
        AscendC::PipeBarrier<PIPE_V>();
        RoundingOf(width, count);
        RowMath math(0, width);
        LargestOfColumns(Columns(kScratch), width, count);
        math.Larger(Columns(kUnfit), Columns(kUnfit), Columns(kScratch));
    }

    __aicore__ inline float Largest(const Row& row)
    {
        AscendC::ReduceRepeat<AscendC::ReduceType::MAX>(Columns(kScratch), row, kFloats, 1, 1, 1, 8,
                                                        AscendC::ReduceOrder::ORDER_ONLY_VALUE);
        const AscendC::TEventID done = GetTPipePtr()->FetchEventID(AscendC::HardEvent::V_S);
        AscendC::SetFlag<AscendC::HardEvent::V_S>(done);
        AscendC::WaitFlag<AscendC::HardEvent::V_S>(done);
        return Columns(kScratch).GetValue(0);
    }

    __aicore__ inline uint64_t AnchorRow(uint32_t head, uint32_t row) const
    {
        return (static_cast<uint64_t>(head) * 2 * t_.blocks + row) * t_.dim;
    }

    // Of the first block also what the anchor leaves of the mean; other blocks leave that row to StoreDistance.
    __aicore__ inline void StoreAnchor(uint32_t head, uint32_t block, uint32_t first, uint32_t width)
    {
        RowMath math(0, width);
        StoreHalfRow(Columns(kAnchor), AnchorRow(head, 2 * block) + first, width, math);
        if (block > 0) return;
        math.Subtract(Columns(kScratch), Columns(kMean), Columns(kAnchor));
        math.Clamp(Columns(kScratch), Columns(kScratch), kHalfLargest);
        StoreHalfRow(Columns(kScratch), AnchorRow(head, 1) + first, width, math);
    }

    __aicore__ inline void StoreHalfRow(const Row& row, uint64_t at, uint32_t width, RowMath& math)
    {
        AscendC::LocalTensor<half> out = row_out_.AllocTensor<half>();
        math.ToHalf(out, row);
        row_out_.EnQue(out);
        out = row_out_.DeQue<half>();
        AscendC::DataCopy(anchors_[at], out, width);
        row_out_.FreeTensor(out);
    }

    __aicore__ inline void StoreKeys(uint32_t head, uint32_t block, uint32_t first, uint32_t width, uint32_t count,
                                     float unit)
    {
        TakeOff(block_anchors_[first], width, count);
        AscendC::Muls(left_, left_, unit, width, count, AscendC::UnaryRepeatParams(1, 1, 8, 8));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::LocalTensor<half> out = half_out_.AllocTensor<half>();
        AscendC::Cast(out, left_, AscendC::RoundMode::CAST_RINT, width, count, AscendC::UnaryRepeatParams(1, 1, 4, 8));
        half_out_.EnQue(out);
        out = half_out_.DeQue<half>();
        AscendC::DataCopyParams p;
        p.blockCount = count;
        p.blockLen = width / kFractal;
        p.srcGap = (kFloats - width) / kFractal;
        p.dstGap = (t_.dim + kFractal - width) / kFractal;
        AscendC::DataCopy(keys_[KeyRow(head, block) + first], out, p);
        half_out_.FreeTensor(out);
    }

    __aicore__ inline uint64_t KeyRow(uint32_t head, uint32_t block) const
    {
        return (static_cast<uint64_t>(head) * t_.keys + block * kBlockKeys) * (t_.dim + kFractal);
    }

    // The extra fractal: -1 where the reference's two terms are, 0 behind them.
    __aicore__ inline void StoreReferenceColumns(uint32_t head, uint32_t block, uint32_t count)
    {
        AscendC::LocalTensor<half> out = column_out_.AllocTensor<half>();
        AscendC::Duplicate(out, static_cast<half>(0.0f), static_cast<int32_t>(kBlockKeys * kFractal));
        AscendC::PipeBarrier<PIPE_V>();
        uint64_t mask[2] = {0x0003000300030003, 0x0003000300030003};
        AscendC::Duplicate(out, static_cast<half>(-1.0f), mask, kBlockKeys * kFractal / kHalves, 1, 8);
        column_out_.EnQue(out);
        out = column_out_.DeQue<half>();
        AscendC::DataCopyParams p;
        p.blockCount = count;
        p.blockLen = 1;
        p.dstGap = t_.dim / kFractal;
        AscendC::DataCopy(keys_[KeyRow(head, block) + t_.dim], out, p);
        column_out_.FreeTensor(out);
    }

    __aicore__ inline void StoreUnit(uint32_t head, uint32_t block, float unit)
    {
        AscendC::LocalTensor<float> out = unit_out_.AllocTensor<float>();
        AscendC::Duplicate(out, unit, static_cast<int32_t>(kFloatBlock));
        unit_out_.EnQue(out);
        out = unit_out_.DeQue<float>();
        AscendC::DataCopy(units_[(static_cast<uint64_t>(head) * t_.blocks + block) * kFloatBlock], out, kFloatBlock);
        unit_out_.FreeTensor(out);
    }

    // a_j - a_1 as two FP16 numbers, in place of a_j.
    __aicore__ inline void StoreDistance(uint32_t head, uint32_t block)
    {
        for (uint32_t first = 0; first < t_.dim; first += kFloats) {
            const uint32_t width = Least(kFloats, t_.dim - first);
            RowMath math(0, width);
            LoadHalfRow(Columns(kAnchor), AnchorRow(head, 2 * block) + first, width, math);
            LoadHalfRow(Columns(kMean), AnchorRow(head, 0) + first, width, math);
            const Row distance = Columns(kAnchor), high = Columns(kMean);
            math.Subtract(distance, distance, high);
            math.Clamp(high, distance, kHalfLargest);
            StoreHalfRow(high, AnchorRow(head, 2 * block) + first, width, math);
            const AscendC::LocalTensor<half> rounded = bits_buffer_.Get<half>();
            math.ToHalf(rounded, high);
            math.ToFloat(high, rounded);
            math.Subtract(distance, distance, high);
            math.Clamp(distance, distance, kHalfLargest);
            StoreHalfRow(distance, AnchorRow(head, 2 * block + 1) + first, width, math);
        }
    }

    __aicore__ inline void LoadHalfRow(const Row& to, uint64_t at, uint32_t width, RowMath& math)
    {
        AscendC::LocalTensor<half> in = half_in_.AllocTensor<half>();
        AscendC::DataCopy(in, anchors_[at], width);
        half_in_.EnQue(in);
        in = half_in_.DeQue<half>();
        math.ToFloat(to, in);
        half_in_.FreeTensor(in);
    }

    const ShiftTiling& t_;
    AscendC::GlobalTensor<half> k_, keys_, anchors_;
    AscendC::GlobalTensor<float> units_;
    AscendC::GlobalTensor<int32_t> lengths_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> half_in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> half_out_, row_out_, unit_out_, column_out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> wide_buffer_, left_buffer_, back_buffer_, half_buffer_,
        columns_buffer_, anchors_buffer_, bits_buffer_;
    AscendC::LocalTensor<float> wide_, left_, back_, columns_, block_anchors_;
    AscendC::LocalTensor<half> half_;
};

// On vector cores alone, all at once: SyncAll waits for every one of them.
__aicore__ inline void ShiftExact(const ShiftArguments& arguments, const ShiftTiling& tiling)
{
    const OverflowMode mode(tiling.saturates != 0);
    AscendC::TPipe pipe;
    ShiftExactly(arguments, tiling, pipe).Run();
}

}  // namespace pasa
