// Output rows of a vector core: divided by their sums, kept within FP16's range, and rounded once.
#pragma once

#include "unbiased.h"

namespace pasa {

class RoundedRows {
public:
    using Row = RowMath::Row;
    using HalfTile = AscendC::LocalTensor<half>;
    using FloatTile = AscendC::LocalTensor<float>;

    // `tile` (rows, 128), `work`, `low` and `high` are scratch, as UnbiasedRounding wants them.
    __aicore__ inline RoundedRows(const AttentionTiling& tiling, const FloatTile& tile, const FloatTile& work,
                                  const Row& low, const Row& high, uint32_t rows)
        : t_(tiling),
          tile_(tile),
          unbiased_(tiling, tile, work, low, high, rows),
          rows_(rows),
          stride_(tiling.dim / kFloatBlock)
    {
    }

    // Columns d to d + width of O / l as 16-bit numbers to `to` (rows, width). `out` is O from column d on, rows of the
    // whole head dimension; l is spread. `clamps`: they are means of finite values, or not finite. Columns come in
    // order.
    __aicore__ inline void Make(const HalfTile& to, const FloatTile& out, const FloatTile& l, uint32_t d,
                                uint32_t width, bool clamps)
    {
        for (uint32_t c = 0; c < width; c += kFloats) {
            AscendC::Div(out[c], out[c], l, Least(kFloats, width - c), rows_,
                         AscendC::BinaryRepeatParams(1, 1, 0, stride_, stride_, 1));
        }
        AscendC::PipeBarrier<PIPE_V>();
        if (clamps) WithinRange(out, width);
        if (d == 0 && t_.unbiased_columns > 0) drawn_ = unbiased_.FlagRows(out);
        if (drawn_) unbiased_.Draw(out, d, width);
        if (t_.to_bf16) {
            Round(to.ReinterpretCast<bfloat16_t>(), out, width);
        } else {
            Round(to, out, width);
        }
    }

private:
    // A mean fits wherever its values do, but O and l are rounded on their own: a few thousand roundings may carry
    // 65504 past 65520, where infinity begins. x becomes its nearest number in FP16's range, plus 0 x: NaN where it is
    // not finite, and a zero keeps its sign.
    __aicore__ inline void WithinRange(const FloatTile& out, uint32_t width)
    {
        for (uint32_t c = 0; c < width; c += kFloats) {
            const uint32_t part = Least(kFloats, width - c);
            const AscendC::UnaryRepeatParams in_place(1, 1, kTileBlocks, kTileBlocks);
            AscendC::Mins(tile_, out[c], kHalfLargest, part, rows_,
                          AscendC::UnaryRepeatParams(1, 1, kTileBlocks, stride_));
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Maxs(tile_, tile_, -kHalfLargest, part, rows_, in_place);
            AscendC::Muls(out[c], out[c], 0.0f, part, rows_, AscendC::UnaryRepeatParams(1, 1, stride_, stride_));
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Add(out[c], out[c], tile_, part, rows_,
                         AscendC::BinaryRepeatParams(1, 1, 1, stride_, stride_, kTileBlocks));
            AscendC::PipeBarrier<PIPE_V>();
        }
    }

    // Columns of the output to nearest.
    template <typename T>
    __aicore__ inline void Round(const AscendC::LocalTensor<T>& to, const FloatTile& out, uint32_t width)
    {
        for (uint32_t c = 0; c < width; c += kFloats) {
            AscendC::Cast(to[c], out[c], AscendC::RoundMode::CAST_RINT, Least(kFloats, width - c), rows_,
                          AscendC::UnaryRepeatParams(1, 1, width / kFractal, stride_));
        }
    }

    const AttentionTiling& t_;
    FloatTile tile_;
    UnbiasedRounding unbiased_;
    uint32_t rows_;
    uint32_t stride_;  // of a row of O, in blocks of 32 bytes
    bool drawn_ = false;
};

}  // namespace pasa
