// What a task of attention on an Ascend 310P reads and leaves in memory of its rows: sinks, outputs and log-sum-exps.
#pragma once

#include "../arguments.h"
#include "../task.h"
#include "core_rows.h"

namespace pasa {

class CoreState : protected CoreRows {
protected:
    __aicore__ inline CoreState(const Arguments& arguments, const AttentionTiling& tiling, AscendC::TPipe& pipe)
        : CoreRows(tiling.dim, pipe),
          t_(tiling),
          tasks_(tiling, arguments.lengths, arguments.visits)
    {
        out_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.out));
        lse_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.lse));
        if (t_.has_largest) largest_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.largest));
        if (t_.has_sinks) sinks_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.sinks));
        if (t_.parts > 1) parts_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.workspace));
        pipe.InitBuffer(tile_out_, 1, kHalfRows * tiling.dim * sizeof(half));
        pipe.InitBuffer(row_out_, 1, kHalfRows * sizeof(float));
        pipe.InitBuffer(sink_in_, 1, kHalfRows * sizeof(float));
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
        CloseRows(without_keys);
        if (t_.has_sinks) {
            LoadSinks(task);
            AddSinks();
        }
        SpreadRows(spread_, Number(kSum), rows_);
        AscendC::PipeBarrier<PIPE_V>();
        FloatTile lse = row_out_.AllocTensor<float>();
        MakeLogSums(lse, without_keys, t_.has_sinks);
        StoreRow(lse_, lse, task);
        if (t_.has_largest) StoreLargest(task, without_keys);
        HalfTile out = tile_out_.AllocTensor<half>();
        MakeOutput(out);
        tile_out_.EnQue(out);
        out = tile_out_.DeQue<half>();
        AscendC::DataCopy(out_[FirstRow(task.head, task) * t_.dim], out, rows_ * t_.dim);
        tile_out_.FreeTensor(out);
    }

    const AttentionTiling& t_;
    Tasks tasks_;
    AscendC::GlobalTensor<float> parts_;

private:
    // The first row of a task, among those of all heads.
    __aicore__ inline uint64_t FirstRow(uint32_t head, const Task& task) const
    {
        return static_cast<uint64_t>(head) * RoundUp(t_.rows, kFractal) + task.lane[0].first_row;
    }

    // To kKeep.
    __aicore__ inline void LoadSinks(const Task& task)
    {
        FloatTile sinks = sink_in_.AllocTensor<float>();
        AscendC::DataCopy(sinks, sinks_[FirstRow(task.head % t_.heads, task)], rows_);
        sink_in_.EnQue(sinks);
        sinks = sink_in_.DeQue<float>();
        RowMath(0, rows_).Scale(Number(kKeep), sinks, 1.0f);
        sink_in_.FreeTensor(sinks);
    }

    __aicore__ inline void StoreLargest(const Task& task, RowBits without_keys)
    {
        RowMath all(0, rows_), never(without_keys);
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

    AscendC::GlobalTensor<half> out_;
    AscendC::GlobalTensor<float> lse_, largest_, sinks_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> sink_in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> tile_out_, row_out_;
};

}  // namespace pasa
