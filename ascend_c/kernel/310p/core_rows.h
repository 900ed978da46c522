// The rows of a tile on a core of an Ascend 310P: their numbers, their output so far, and the tile of scores and
// weights. Where the results lie in memory is for who derives from this.
#pragma once

#include "../key_blocks.h"
#include "fractals.h"

namespace pasa {

// The reference of a row before its first key, in nats: below every score, which is above -2^123, and below
// kHiddenNats. Its distance to any of them is an FP32 number.
constexpr float kBeforeAll = -0x1p125f;
// A score that a row does not see, in nats.
constexpr float kHiddenNats = -0x1p124f;
// 11 ln 2: weights are exp(score - reference), and the reference is this much below the row's largest score. FP32
// rounds that distance to its grid, a power of two: to 8 where the grid is 1, 2, 4 or 8 nats, and to 0 where it is
// coarser. So a weight is at most e^8 = 2981 at any score, and FP16 rounds one to zero only 24.9 nats below the
// largest.
constexpr float kBelowLargest = 7.624618986f;

class CoreRows {
protected:
    using Row = RowMath::Row;
    using FloatTile = AscendC::LocalTensor<float>;
    using HalfTile = AscendC::LocalTensor<half>;

    // Numbers of rows. These are nats: kReference, what the weights are relative to; kFrame and kFramed, q.f of the
    // blocks so far and of this one; kBest, the largest score so far; kOffset, q.(a - f) of this block; kGap, the
    // reference as seen from its scores. A part of the keys leaves the first ones behind.
    enum RowNumber {
        kReference, kSum, kFrame, kBest,
        kFramed, kOffset, kGap, kTop, kRaised, kKeep, kScratch, kRows
    };
    static_assert(kFramed == kPartNumbers, "the host plans for as many");

    __aicore__ inline CoreRows(uint32_t dim, AscendC::TPipe& pipe) : dim_(dim)
    {
        pipe.InitBuffer(output_buffer_, kHalfRows * dim * sizeof(float));
        pipe.InitBuffer(spread_buffer_, kHalfRows * kFractal * sizeof(float));
        pipe.InitBuffer(rows_buffer_, kRows * kHalfRows * sizeof(float));
        output_ = output_buffer_.Get<float>();
        spread_ = spread_buffer_.Get<float>();
        values_ = rows_buffer_.Get<float>();
        AscendC::Duplicate(values_, 0.0f, static_cast<int32_t>(kPartNumbers * kHalfRows));  // parts store all 64 rows
    }

    // For who forms scores, and products of `row_products` rows with the queries.
    __aicore__ inline void InitTile(uint32_t row_products, AscendC::TPipe& pipe)
    {
        pipe.InitBuffer(tile_buffer_, kHalfRows * kBlockKeys * sizeof(float));
        pipe.InitBuffer(work_buffer_, FractalTile::kWork * sizeof(float));
        pipe.InitBuffer(offset_buffer_, row_products * kHalfRows * sizeof(float));
        pipe.InitBuffer(sums_buffer_, kHalfRows * kFractal * sizeof(float));
        tile_ = tile_buffer_.Get<float>();
        work_ = work_buffer_.Get<float>();
        offsets_ = offset_buffer_.Get<float>();
        sums_ = sums_buffer_.Get<float>();
    }

    __aicore__ inline Row Number(RowNumber which) const { return values_[which * kHalfRows]; }

    // So many rows have seen nothing yet.
    __aicore__ inline void BeginRows(uint32_t rows)
    {
        rows_ = RoundUp(rows, kFractal);
        group_ = rows_ * kFractal;
        RowMath all(0, rows_);
        AscendC::PipeBarrier<PIPE_V>();
        all.Set(Number(kReference), kBeforeAll);
        all.Set(Number(kSum), 0.0f);
        all.Set(Number(kFrame), 0.0f);
        all.Set(Number(kBest), kNothing);
        AscendC::Duplicate(output_, 0.0f, static_cast<int32_t>(rows_ * dim_));
    }

    // So many numbers from L0C to UB, in fractals.
    __aicore__ inline void CopyOut(const FloatTile& to, const FloatTile& c, uint32_t numbers)
    {
        AscendC::DataCopyParams p;
        p.blockCount = 1;
        p.blockLen = numbers / (kFractal * kFractal);
        AscendC::DataCopyEnhancedParams whole;
        whole.blockMode = AscendC::BlockMode::BLOCK_MODE_MATRIX;
        AscendC::DataCopy(to, c, p, whole);
    }

    // The products of one of so many rows and the queries, in nats, from offsets_.
    __aicore__ inline void TakeOffsets(const Row& to, uint32_t row, uint32_t all_rows, float scale)
    {
        const uint32_t lanes = rows_ / kFractal * kFloatBlock;
        for (uint32_t part = 0; part < kFractal; part += kFloatBlock) {
            AscendC::Muls(to[part], offsets_[row * kFractal + part], scale, lanes, 1,
                          AscendC::UnaryRepeatParams(2, all_rows * 2, 8, 8));
        }
    }

    // kReference to kRaised where that is larger, and kKeep to the factor of the output so far.
    __aicore__ inline void RaiseReference()
    {
        RowMath all(0, rows_);
        const Row reference = Number(kReference), raised = Number(kRaised);
        all.Larger(raised, raised, reference);
        AscendC::PipeBarrier<PIPE_V>();
        all.Subtract(Number(kKeep), reference, raised);
        AscendC::PipeBarrier<PIPE_V>();
        all.Exponential(Number(kKeep), Number(kKeep));
        all.Scale(reference, raised, 1.0f);
    }

    // The tile's scores, less a number of each row, to weights that are rounded, for MTE3. The caller frees them.
    template <typename Queue>
    __aicore__ inline HalfTile TakeWeights(Queue& queue, const Row& reference)
    {
        HalfTile weights = queue.template AllocTensor<half>();
        FractalTile tile(tile_, work_, rows_);
        SpreadRows(spread_, reference, rows_);
        AscendC::PipeBarrier<PIPE_V>();
        tile.Subtract(spread_);
        AscendC::PipeBarrier<PIPE_V>();
        tile.Exponential();
        AscendC::PipeBarrier<PIPE_V>();
        tile.ToHalf(weights);
        queue.EnQue(weights);
        return queue.template DeQue<half>();
    }

    // O and l of the next block, (D / 16 + 1, rows, 16) in L0C, to those so far. The tile's scores leave their place.
    template <typename Products>
    __aicore__ inline void AddBlock(Products& products)
    {
        FloatTile product = products.TakeProduct();
        CopyOut(sums_, product[rows_ * dim_], group_);
        for (uint32_t d = 0; d < dim_; d += kChunk) {
            const uint32_t numbers = rows_ * Least(kChunk, dim_ - d);
            AscendC::PipeBarrier<PIPE_V>();
            CopyOut(tile_, product[d * rows_], numbers);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Add(output_[d * rows_], output_[d * rows_], tile_, static_cast<int32_t>(numbers));
        }
        products.FreeProduct(product);
        // a sum stands in all 16 columns: of eight of them the largest
        AscendC::ReduceDataBlock<AscendC::ReduceType::MAX>(Number(kScratch), sums_, kFloats, rows_ / kFloatBlock, 1, 2,
                                                           kFractal);
        AscendC::PipeBarrier<PIPE_V>();
        RowMath(0, rows_).Add(Number(kSum), Number(kSum), Number(kScratch));
    }

    // O and l by kKeep.
    __aicore__ inline void Rescale()
    {
        SpreadRows(spread_, Number(kKeep), rows_);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t d = 0; d < dim_; d += kFractal) {
            AscendC::Mul(output_[d * rows_], output_[d * rows_], spread_, static_cast<int32_t>(group_));
        }
        RowMath(0, rows_).Multiply(Number(kSum), Number(kSum), Number(kKeep));
    }

    // The first numbers of rows and O, as they are, for who merges them.
    __aicore__ inline void StoreRows(const AscendC::GlobalTensor<float>& numbers,
                                     const AscendC::GlobalTensor<float>& output, uint32_t count)
    {
        const AscendC::TEventID made = GetTPipePtr()->FetchEventID(AscendC::HardEvent::V_MTE3);
        AscendC::SetFlag<AscendC::HardEvent::V_MTE3>(made);
        AscendC::WaitFlag<AscendC::HardEvent::V_MTE3>(made);
        AscendC::DataCopy(numbers, values_, count * kHalfRows);
        AscendC::DataCopy(output, output_, rows_ * dim_);
        const AscendC::TEventID stored = GetTPipePtr()->FetchEventID(AscendC::HardEvent::MTE3_V);
        AscendC::SetFlag<AscendC::HardEvent::MTE3_V>(stored);
        AscendC::WaitFlag<AscendC::HardEvent::MTE3_V>(stored);
    }

    // End the sums of rows: kReference is out of its frame, and kScratch is ln l. Outputs of rows that have seen no key
    // are 0.
    __aicore__ inline void CloseRows(RowBits without_keys)
    {
        RowMath all(0, rows_), never(without_keys);
        AscendC::PipeBarrier<PIPE_V>();
        never.Set(Number(kSum), 1.0f);
        for (uint32_t r = 0; without_keys != 0 && r < rows_; ++r) {  // masked keys had weight
            if ((without_keys >> r & 1) == 0) continue;
            AscendC::Duplicate(output_[r * kFractal], 0.0f, kFractal, dim_ / kFractal, 1, group_ / kFloatBlock);
        }
        all.Add(Number(kReference), Number(kReference), Number(kFrame));
        AscendC::PipeBarrier<PIPE_V>();
        all.Logarithm(Number(kScratch), Number(kSum));
    }
    // Behind CloseRows: one more score of each row, in kKeep.
    __aicore__ inline void AddSinks()
    {
        RowMath all(0, rows_);
        TakeSink(all, Number(kReference), Number(kSum), Number(kScratch), Number(kKeep), Number(kGap));
    }

    // The log-sum-exps of rows; those of rows that have seen no key are their sinks.
    __aicore__ inline void MakeLogSums(const Row& lse, RowBits without_keys, bool has_sinks)
    {
        RowMath all(0, rows_), never(without_keys);
        all.Add(lse, Number(kReference), Number(kScratch));
        AscendC::PipeBarrier<PIPE_V>();
        if (has_sinks) {
            never.Scale(lse, Number(kKeep), 1.0f);
        } else {
            never.SetBits(lse, kMinusInfinity);
        }
    }

    // O / l in FP16, row by row; spread_ is l.
    __aicore__ inline void MakeOutput(const HalfTile& out)
    {
        const int32_t numbers = static_cast<int32_t>(rows_ * dim_);
        for (uint32_t d = 0; d < dim_; d += kFractal) {
            AscendC::Div(output_[d * rows_], output_[d * rows_], spread_, static_cast<int32_t>(group_));
        }
        AscendC::PipeBarrier<PIPE_V>();
        // A mean is within FP16's range, but thousands of roundings of O and l may carry O / l beyond it.
        AscendC::Mins(output_, output_, kHalfLargest, numbers);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Maxs(output_, output_, -kHalfLargest, numbers);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t d = 0; d < dim_; d += kFractal) {  // four rows of a fractal column at a time, to rows
            AscendC::Cast(out[d], output_[d * rows_], AscendC::RoundMode::CAST_NONE, kFloats, group_ / kFloats,
                          AscendC::UnaryRepeatParams(dim_ / kFractal, 1, dim_ / 4, 8));
        }
    }

    FloatTile output_, spread_, values_;
    FloatTile tile_, work_, offsets_, sums_;
    uint32_t rows_ = 0;   // of the tile, a multiple of 16
    uint32_t group_ = 0;  // numbers of 16 columns

private:
    uint32_t dim_;
    AscendC::TBuf<AscendC::TPosition::VECOUT> output_buffer_, rows_buffer_;  // which parts store as they are
    AscendC::TBuf<AscendC::TPosition::VECCALC> spread_buffer_, tile_buffer_, work_buffer_, offset_buffer_, sums_buffer_;
};

}  // namespace pasa
