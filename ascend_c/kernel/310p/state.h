// The rows of a tile on a core of an Ascend 310P: their numbers, their output so far, and how both are stored.
#pragma once

#include "../arguments.h"
#include "../task.h"
#include "fractals.h"

namespace pasa {

class CoreState {
protected:
    using Row = RowMath::Row;
    using FloatTile = AscendC::LocalTensor<float>;
    using HalfTile = AscendC::LocalTensor<half>;

    // Numbers of rows. These are nats: kReference, what the weights are relative to; kFrame and kFramed, q.f of the blocks
    // so far and of this one; kBest, the largest score so far; kOffset, q.(a - f) of this block; kGap, the reference as
    // seen from its scores. A part of the keys leaves the first ones behind.
    enum RowNumber {
        kReference, kSum, kFrame, kBest,
        kFramed, kOffset, kGap, kTop, kRaised, kKeep, kScratch, kRows
    };
    static_assert(kFramed == kPartNumbers, "the host plans for as many");

    __aicore__ inline CoreState(const Arguments& arguments, const AttentionTiling& tiling, AscendC::TPipe& pipe)
        : t_(tiling),
          tasks_(tiling, arguments.lengths, arguments.visits)
    {
        out_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.out));
        lse_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.lse));
        if (t_.has_largest) largest_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.largest));
        if (t_.has_sinks) sinks_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.sinks));
        if (t_.parts > 1) parts_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.workspace));
        pipe.InitBuffer(output_buffer_, kHalfRows * tiling.dim * sizeof(float));
        pipe.InitBuffer(spread_buffer_, kHalfRows * kFractal * sizeof(float));
        pipe.InitBuffer(rows_buffer_, kRows * kHalfRows * sizeof(float));
        pipe.InitBuffer(tile_out_, 1, kHalfRows * tiling.dim * sizeof(half));
        pipe.InitBuffer(row_out_, 1, kHalfRows * sizeof(float));
        pipe.InitBuffer(sink_in_, 1, kHalfRows * sizeof(float));
        output_ = output_buffer_.Get<float>();
        spread_ = spread_buffer_.Get<float>();
        values_ = rows_buffer_.Get<float>();
        AscendC::Duplicate(values_, 0.0f, static_cast<int32_t>(kPartNumbers * kHalfRows));  // parts store all 64 rows
    }

    __aicore__ inline Row Number(RowNumber which) const { return values_[which * kHalfRows]; }

    // The rows of a task have seen nothing yet.
    __aicore__ inline void BeginRows(const Task& task)
    {
        rows_ = RoundUp(task.lane[0].rows, kFractal);
        group_ = rows_ * kFractal;
        RowMath all(0, rows_);
        AscendC::PipeBarrier<PIPE_V>();
        all.Set(Number(kReference), kNothing);
        all.Set(Number(kSum), 0.0f);
        all.Set(Number(kFrame), 0.0f);
        all.Set(Number(kBest), kNothing);
        AscendC::Duplicate(output_, 0.0f, static_cast<int32_t>(rows_ * t_.dim));
    }

    // O and l by kKeep.
    __aicore__ inline void Rescale()
    {
        SpreadRows(spread_, Number(kKeep), rows_);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t d = 0; d < t_.dim; d += kFractal) {
            AscendC::Mul(output_[d * rows_], output_[d * rows_], spread_, static_cast<int32_t>(group_));
        }
        RowMath(0, rows_).Multiply(Number(kSum), Number(kSum), Number(kKeep));
    }

    // Where a part of the keys of a task leaves its numbers (4, 64) and O.
    __aicore__ inline uint64_t PartPlace(const Task& task) const
    {
        const uint64_t tiles = DivideUp(t_.rows, kHalfRows);
        const uint64_t tile = task.head * tiles + task.lane[0].first_row / kHalfRows;
        return (tile * t_.parts + task.part) * (kPartNumbers + t_.dim) * kHalfRows;
    }

    // Outputs of rows that have `seen` a key; those of others are 0.
    __aicore__ inline void Finish(const Task& task, RowBits seen)
    {
        const RowBits without_keys = RowsBetween(0, rows_) & ~seen;
        RowMath all(0, rows_), never(without_keys);
        AscendC::PipeBarrier<PIPE_V>();
        never.Set(Number(kSum), 1.0f);
        for (uint32_t r = 0; without_keys != 0 && r < rows_; ++r) {  // masked keys had weight
            if ((without_keys >> r & 1) == 0) continue;
            AscendC::Duplicate(output_[r * kFractal], 0.0f, kFractal, t_.dim / kFractal, 1, group_ / kFloatBlock);
        }
        all.Add(Number(kReference), Number(kReference), Number(kFrame));
        AscendC::PipeBarrier<PIPE_V>();
        all.Logarithm(Number(kScratch), Number(kSum));
        if (t_.has_sinks) {
            FloatTile sinks = LoadSinks(task);
            TakeSink(all, Number(kReference), Number(kSum), Number(kScratch), sinks, Number(kGap));
            all.Scale(Number(kKeep), sinks, 1.0f);
            sink_in_.FreeTensor(sinks);
        }
        SpreadRows(spread_, Number(kSum), rows_);
        AscendC::PipeBarrier<PIPE_V>();
        StoreNumbers(task, never);
        StoreOutput(task);
    }

    const AttentionTiling& t_;
    Tasks tasks_;
    AscendC::GlobalTensor<float> parts_;
    FloatTile output_, spread_, values_;
    uint32_t rows_ = 0;   // of the tile, a multiple of 16
    uint32_t group_ = 0;  // numbers of 16 columns

private:
    // The first row of a task, among those of all heads.
    __aicore__ inline uint64_t FirstRow(uint32_t head, const Task& task) const
    {
        return static_cast<uint64_t>(head) * RoundUp(t_.rows, kFractal) + task.lane[0].first_row;
    }

    __aicore__ inline FloatTile LoadSinks(const Task& task)
    {
        FloatTile sinks = sink_in_.AllocTensor<float>();
        AscendC::DataCopy(sinks, sinks_[FirstRow(task.head % t_.heads, task)], rows_);
        sink_in_.EnQue(sinks);
        return sink_in_.DeQue<float>();
    }

    // The log-sum-exp, and the largest score. kScratch is ln l, and kKeep a sink.
    __aicore__ inline void StoreNumbers(const Task& task, RowMath& never)
    {
        RowMath all(0, rows_);
        FloatTile lse = row_out_.AllocTensor<float>();
        all.Add(lse, Number(kReference), Number(kScratch));
        AscendC::PipeBarrier<PIPE_V>();
        if (t_.has_sinks) {
            never.Scale(lse, Number(kKeep), 1.0f);
        } else {
            never.SetBits(lse, kMinusInfinity);
        }
        StoreRow(lse_, lse, task);
        if (!t_.has_largest) return;
        FloatTile largest = row_out_.AllocTensor<float>();
        all.Add(largest, Number(kBest), Number(kFrame));
        AscendC::PipeBarrier<PIPE_V>();
        never.SetBits(largest, kMinusInfinity);
        StoreRow(largest_, largest, task);
    }

    // A number of each row.
    __aicore__ inline void StoreRow(const AscendC::GlobalTensor<float>& to, FloatTile& numbers, const Task& task)
    {
        row_out_.EnQue(numbers);
        numbers = row_out_.DeQue<float>();
        AscendC::DataCopy(to[FirstRow(task.head, task)], numbers, rows_);
        row_out_.FreeTensor(numbers);
    }

    // O / l, l being spread.
    __aicore__ inline void StoreOutput(const Task& task)
    {
        const int32_t numbers = static_cast<int32_t>(rows_ * t_.dim);
        for (uint32_t d = 0; d < t_.dim; d += kFractal) {
            AscendC::Div(output_[d * rows_], output_[d * rows_], spread_, static_cast<int32_t>(group_));
        }
        AscendC::PipeBarrier<PIPE_V>();
        // A mean is within FP16's range, but thousands of roundings of O and l may carry O / l beyond it.
        AscendC::Mins(output_, output_, kHalfLargest, numbers);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Maxs(output_, output_, -kHalfLargest, numbers);
        AscendC::PipeBarrier<PIPE_V>();
        HalfTile out = tile_out_.AllocTensor<half>();
        for (uint32_t d = 0; d < t_.dim; d += kFractal) {  // four rows of a fractal column at a time, to rows
            AscendC::Cast(out[d], output_[d * rows_], AscendC::RoundMode::CAST_NONE, kFloats, group_ / kFloats,
                          AscendC::UnaryRepeatParams(t_.dim / kFractal, 1, t_.dim / 4, 8));
        }
        tile_out_.EnQue(out);
        out = tile_out_.DeQue<half>();
        AscendC::DataCopy(out_[FirstRow(task.head, task) * t_.dim], out, static_cast<uint32_t>(numbers));
        tile_out_.FreeTensor(out);
    }

    AscendC::GlobalTensor<half> out_;
    AscendC::GlobalTensor<float> lse_, largest_, sinks_;
    AscendC::TBuf<AscendC::TPosition::VECOUT> output_buffer_, rows_buffer_;  // which parts store as they are
    AscendC::TBuf<AscendC::TPosition::VECCALC> spread_buffer_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> sink_in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> tile_out_, row_out_;
};

}  // namespace pasa
