// Tiles of fractals on an Ascend 310P: L0C, L1, UB, and K' and V in memory hold 16 columns of all rows, then the next
// 16.
#pragma once

#include "../rows.h"

namespace pasa {

// K' and V in memory: blocks of keys as (D / 16, 128, 16). Behind the last key, rows are 0 up to a multiple of 16.
struct FractalKeys {
    // An Ascend 310P converts no float to float. An FP32 sum with 1.5 x 2^23 has no digits behind the point.
    static __aicore__ inline void ToIntegers(const RowMath::Row& row, uint32_t count)
    {
        const AscendC::UnaryRepeatParams in_place(1, 1, 8, 8);
        AscendC::Adds(row, row, 0x1.8p23f, count, 1, in_place);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(row, row, -0x1.8p23f, count, 1, in_place);
    }
    static __aicore__ inline uint64_t Place(const ShiftTiling& t, uint32_t head, uint32_t block, uint32_t)
    {
        return (static_cast<uint64_t>(head) * t.blocks + block) * kBlockKeys * t.dim;
    }
    // Rows behind the last key, of keys row by row.
    static __aicore__ inline void FillUp(const AscendC::LocalTensor<half>& keys, uint32_t dim, uint32_t count)
    {
        const uint32_t rest = RoundUp(count, kFractal) - count;
        if (rest > 0) {
            AscendC::Duplicate(keys[count * dim], static_cast<half>(0.0f), static_cast<int32_t>(rest * dim));
        }
    }
    // Keys row by row in UB to fractals in memory: the copies read 32 bytes of each row.
    static __aicore__ inline void Store(const AscendC::GlobalTensor<half>& to, const AscendC::LocalTensor<half>& keys,
                                        uint32_t dim, uint32_t count)
    {
        AscendC::DataCopyParams p;
        p.blockCount = RoundUp(count, kFractal);
        p.blockLen = 1;
        p.srcGap = dim / kFractal - 1;
        for (uint32_t d = 0; d < dim; d += kFractal) AscendC::DataCopy(to[d * kBlockKeys], keys[d], p);
    }
};

// Of a call on rows and one row that all of them share, a row in a repeat: its 16 columns go to fractals `rows` apart.
__aicore__ inline AscendC::BinaryRepeatParams ToFractals(uint32_t rows, uint32_t width)
{
    return AscendC::BinaryRepeatParams(rows, 1, 1, 1, width / kFractal, 0);
}

// An FP32 tile (128 columns of so many rows, a multiple of 16) in UB, and numbers of its rows.
class FractalTile {
public:
    using Row = RowMath::Row;
    using Tile = AscendC::LocalTensor<float>;

    static constexpr uint32_t kGroups = kBlockKeys / kFractal;
    // Numbers that FoldFour and FoldHalves need.
    static constexpr uint32_t kWork = (kGroups / 2 * kFractal + kFloatBlock) * kHalfRows;

    __aicore__ inline FractalTile() = default;
    __aicore__ inline FractalTile(const Tile& tile, const Tile& work, uint32_t rows)
        : tile_(tile),
          work_(work),
          rows_(rows),
          group_(rows * kFractal)
    {
    }

    // Numbers of 16 columns.
    __aicore__ inline uint32_t Group() const { return group_; }

    // Columns from `first` on become `value` in all rows.
    __aicore__ inline void HideColumns(uint32_t first, float value)
    {
        const uint32_t whole = DivideUp(first, kFractal), kept = first % kFractal;
        if (kept > 0) {
            const uint64_t row = LanesFrom(kept);
            uint64_t mask[2] = {row | row << 16 | row << 32 | row << 48, 0};
            AscendC::Duplicate(tile_[first / kFractal * group_], value, mask, rows_ * kFractal / kFloats, 1, 8);
        }
        if (whole < kGroups) {
            AscendC::Duplicate(tile_[whole * group_], value, static_cast<int32_t>((kGroups - whole) * group_));
        }
    }

    // The same in one row.
    __aicore__ inline void HideInRow(uint32_t row, uint32_t first, float value)
    {
        const uint32_t whole = DivideUp(first, kFractal), kept = first % kFractal;
        if (kept > 0) {
            uint64_t mask[2] = {LanesFrom(kept), 0};
            AscendC::Duplicate(tile_[first / kFractal * group_ + row * kFractal], value, mask, 1, 1, 8);
        }
        if (whole < kGroups) {
            AscendC::Duplicate(tile_[whole * group_ + row * kFractal], value, kFractal, kGroups - whole, 1,
                               group_ / kFloatBlock);
        }
    }

    // Columns before `last` of one row become `value`.
    __aicore__ inline void HideBeforeInRow(uint32_t row, uint32_t last, float value)
    {
        const uint32_t whole = last / kFractal, rest = last % kFractal;
        if (rest > 0) {
            uint64_t mask[2] = {(uint64_t{1} << rest) - 1, 0};
            AscendC::Duplicate(tile_[whole * group_ + row * kFractal], value, mask, 1, 1, 8);
        }
        if (whole > 0) {
            AscendC::Duplicate(tile_[row * kFractal], value, kFractal, whole, 1, group_ / kFloatBlock);
        }
    }

    // Numbers whose bit is 0 become `value`; bits lie as the numbers do.
    __aicore__ inline void Keep(const AscendC::LocalTensor<uint8_t>& bits, float value)
    {
        AscendC::Select(tile_, bits, tile_, value, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, kFloats,
                        rows_ * kBlockKeys / kFloats, AscendC::BinaryRepeatParams());
    }

    // The largest number of each row, in five steps with a barrier behind each.
    __aicore__ inline void FoldEight() { AscendC::Max(work_, tile_, tile_[4 * group_], Count(4)); }
    __aicore__ inline void FoldFour() { AscendC::Max(work_, work_, work_[2 * group_], Count(2)); }
    __aicore__ inline void FoldTwo() { AscendC::Max(work_, work_, work_[group_], Count(1)); }
    __aicore__ inline void FoldHalves()
    {
        AscendC::Max(work_[4 * group_], work_, work_[kFloatBlock], kFloats, rows_ / kFloatBlock,
                     AscendC::BinaryRepeatParams(1, 2, 2, 8, 16, 16));
    }
    __aicore__ inline void Finish(const Row& to)
    {
        const Tile folded = work_[4 * group_];
        AscendC::ReduceDataBlock<AscendC::ReduceType::MAX>(to, folded, kFloats, rows_ / kFloatBlock, 1, 1, 8);
    }

    // The first columns.
    __aicore__ inline void Scale(float factor, uint32_t columns)
    {
        AscendC::Muls(tile_, tile_, factor, Count(columns / kFractal));
    }
    __aicore__ inline void Exponential() { AscendC::Exp(tile_, tile_, Count(kGroups)); }
    // Less a number of each row, which SpreadRows has spread.
    __aicore__ inline void Subtract(const Tile& spread)
    {
        for (uint32_t i = 0; i < kGroups; ++i) {
            AscendC::Sub(tile_[i * group_], tile_[i * group_], spread, Count(1));
        }
    }
    // To nearest.
    __aicore__ inline void ToHalf(const AscendC::LocalTensor<half>& to)
    {
        AscendC::Cast(to, tile_, AscendC::RoundMode::CAST_NONE, static_cast<uint32_t>(Count(kGroups)));
    }

private:
    // Lanes of a row of a fractal from a column on.
    static __aicore__ inline uint64_t LanesFrom(uint32_t column) { return uint64_t{0xffff} << column & 0xffff; }
    __aicore__ inline int32_t Count(uint32_t groups) const { return static_cast<int32_t>(groups * group_); }

    Tile tile_, work_;
    uint32_t rows_ = 0;
    uint32_t group_ = 0;
};

// A number of each row sixteen times: (rows, 16), what a fractal of those rows is divided by, or multiplied with.
__aicore__ inline void SpreadRows(const AscendC::LocalTensor<float>& to, const AscendC::LocalTensor<float>& row,
                                  uint32_t rows)
{
    for (uint32_t half_row = 0; half_row < 2; ++half_row) {
        AscendC::Brcb(to[half_row * kFloatBlock], row, rows / kFloatBlock, AscendC::BrcbRepeatParams(2, 16));
    }
}

}  // namespace pasa
