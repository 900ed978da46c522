// K' for the exact recovery, on the vector cores: an anchor for each column of a block, taken off without rounding.
#pragma once

#include "arguments.h"
#include "key_columns.h"
#include "overflow_mode.h"

namespace pasa {

class ShiftExactly {
public:
    __aicore__ inline ShiftExactly(const ShiftArguments& arguments, const ShiftTiling& tiling, AscendC::TPipe& pipe)
        : t_(tiling),
          columns_(pipe)
    {
        k_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.k));
        keys_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.keys));
        anchors_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.anchors));
        units_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.units));
        if (t_.has_lengths) lengths_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(arguments.lengths));
        pipe.InitBuffer(half_in_, 1, kBlockKeys * kFloats * sizeof(half));
        pipe.InitBuffer(half_out_, 1, kBlockKeys * t_.dim * sizeof(half));
        pipe.InitBuffer(row_out_, 1, kFloats * sizeof(half));
        pipe.InitBuffer(unit_out_, 1, kBlockBytes);
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
    using Row = KeyColumns::Row;

    // Keys of the item's block.
    __aicore__ inline uint32_t Count(uint32_t item)
    {
        const uint32_t batch = item / t_.blocks / t_.kv_heads, first = item % t_.blocks * kBlockKeys;
        const uint32_t keys = t_.has_lengths ? Clamped(lengths_.GetValue(batch), t_.keys) : t_.keys;
        return keys <= first ? 0 : Least(kBlockKeys, keys - first);
    }

    __aicore__ inline void Shift(uint32_t head, uint32_t block, uint32_t count)
    {
        AscendC::LocalTensor<half> out = half_out_.AllocTensor<half>();
        for (uint32_t first = 0; first < t_.dim; first += kFloats) {
            const uint32_t width = Least(kFloats, t_.dim - first);
            AscendC::LocalTensor<half> in = LoadColumns(head, block, first, width, count);
            columns_.TakeAnchorOff(out[first], t_.dim, in, width, count);
            half_in_.FreeTensor(in);
            StoreAnchor(head, block, first, width);
        }
        const float unit = columns_.Rounds(t_.unit, out, count * t_.dim) ? 1.0f : t_.unit;
        AscendC::Muls(out, out, static_cast<half>(unit), static_cast<int32_t>(count * t_.dim));
        half_out_.EnQue(out);
        out = half_out_.DeQue<half>();
        AscendC::DataCopy(keys_[KeyRow(head, block) * t_.dim], out, count * t_.dim);
        half_out_.FreeTensor(out);
        StoreUnit(head, block, unit);
    }

    // FP16 keys (count, width), 64 numbers a row.
    __aicore__ inline AscendC::LocalTensor<half> LoadColumns(uint32_t head, uint32_t block, uint32_t first,
                                                             uint32_t width, uint32_t count)
    {
        AscendC::LocalTensor<half> in = half_in_.AllocTensor<half>();
        AscendC::DataCopyParams p;
        p.blockCount = count;
        p.blockLen = width / kFractal;
        p.srcGap = (t_.dim - width) / kFractal;
        p.dstGap = (kFloats - width) / kFractal;
        AscendC::DataCopy(in, k_[KeyRow(head, block) * t_.dim + first], p);
        half_in_.EnQue(in);
        return half_in_.DeQue<half>();
    }

    __aicore__ inline uint64_t AnchorRow(uint32_t head, uint32_t row) const
    {
        return (static_cast<uint64_t>(head) * 2 * t_.blocks + row) * t_.dim;
    }

    // Of the first block also what the anchor leaves of the mean; other blocks leave that row to StoreDistance.
    __aicore__ inline void StoreAnchor(uint32_t head, uint32_t block, uint32_t first, uint32_t width)
    {
        RowMath math(0, width);
        StoreHalfRow(columns_.Anchor(), AnchorRow(head, 2 * block) + first, width, math);
        if (block > 0) return;
        StoreHalfRow(columns_.Residual(math), AnchorRow(head, 1) + first, width, math);
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

    // The first of a block.
    __aicore__ inline uint64_t KeyRow(uint32_t head, uint32_t block) const
    {
        return static_cast<uint64_t>(head) * t_.keys + block * kBlockKeys;
    }

    __aicore__ inline void StoreUnit(uint32_t head, uint32_t block, float unit)
    {
        AscendC::LocalTensor<float> out = unit_out_.AllocTensor<float>();
        AscendC::Duplicate(out, unit, static_cast<int32_t>(kUnitCopies));
        unit_out_.EnQue(out);
        out = unit_out_.DeQue<float>();
        AscendC::DataCopy(units_[(static_cast<uint64_t>(head) * t_.blocks + block) * kUnitCopies], out, kUnitCopies);
        unit_out_.FreeTensor(out);
    }

    // a_j - a_1 as two FP16 numbers, in place of a_j.
    __aicore__ inline void StoreDistance(uint32_t head, uint32_t block)
    {
        for (uint32_t first = 0; first < t_.dim; first += kFloats) {
            const uint32_t width = Least(kFloats, t_.dim - first);
            RowMath math(0, width);
            AscendC::PipeBarrier<PIPE_V>();
            LoadHalfRow(columns_.Anchor(), AnchorRow(head, 2 * block) + first, width, math);
            LoadHalfRow(columns_.Mean(), AnchorRow(head, 0) + first, width, math);
            AscendC::PipeBarrier<PIPE_V>();
            const Row distance = columns_.Anchor(), high = columns_.Mean();
            math.Subtract(distance, distance, high);
            AscendC::PipeBarrier<PIPE_V>();
            columns_.Clamp(high, distance, math);
            StoreHalfRow(high, AnchorRow(head, 2 * block) + first, width, math);
            columns_.Rounded(high, math);
            math.Subtract(distance, distance, high);
            AscendC::PipeBarrier<PIPE_V>();
            columns_.Clamp(distance, distance, math);
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
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> half_out_, row_out_, unit_out_;
    KeyColumns columns_;
};

// On vector cores alone, all at once: SyncAll waits for every one of them.
__aicore__ inline void ShiftExact(const ShiftArguments& arguments, const ShiftTiling& tiling)
{
    const OverflowMode mode(tiling.saturates != 0);
    AscendC::TPipe pipe;
    ShiftExactly(arguments, tiling, pipe).Run();
}

}  // namespace pasa
