// The output of a vector core's rows: products added up, divided, rounded and stored.
#pragma once

#include "rounded_rows.h"
#include "vector_state.h"

namespace pasa {

constexpr float kLargestLifted = 64.0f;  // of a scale with which FP16 scores in nats less a few nats are near enough

template <bool kExact>
class OutputRows : protected VectorState {
protected:
    using VectorState::VectorState;

    // Scores less a number of each row, which is spread.
    __aicore__ inline void SubtractSpread(uint32_t rows)
    {
        for (uint32_t part = 0; part < 2; ++part) {
            AscendC::Sub(score_tile_[part * kFloats], score_tile_[part * kFloats], spread_, kFloats, rows,
                         AscendC::BinaryRepeatParams(1, 1, 0, kTileBlocks, kTileBlocks, 1));
        }
    }

    // O = keep O, keep being spread.
    __aicore__ inline void ScaleOutput(uint32_t i, uint32_t rows)
    {
        const uint32_t stride = t_.dim / kFloatBlock;
        for (uint32_t c = 0; c < t_.dim; c += kFloats) {
            AscendC::Mul(Output(i)[c], Output(i)[c], spread_, Least(kFloats, t_.dim - c), rows,
                         AscendC::BinaryRepeatParams(1, 1, 0, stride, stride, 1));
        }
    }

    // O of a lane = O + P V, from a workspace.
    __aicore__ inline void AddProduct(uint32_t lane, uint32_t slot, uint32_t rows)
    {
        for (uint32_t d = 0; d < t_.dim; d += kChunk) {
            const uint32_t width = Least(kChunk, t_.dim - d);
            FloatTile product = wide_in_.AllocTensor<float>();
            AscendC::DataCopyParams p;
            p.blockCount = rows;
            p.blockLen = width / kFloatBlock;
            p.srcGap = (t_.dim - width) / kFloatBlock;
            AscendC::DataCopy(product, product_[slot][d], p);
            wide_in_.EnQue(product);
            product = wide_in_.DeQue<float>();
            const FloatTile out = Output(lane)[d];
            for (uint32_t c = 0; c < width; c += kFloats) {
                AscendC::Add(out[c], out[c], product[c], Least(kFloats, width - c), rows,
                             AscendC::BinaryRepeatParams(1, 1, 1, t_.dim / kFloatBlock, t_.dim / kFloatBlock,
                                                         width / kFloatBlock));
            }
            wide_in_.FreeTensor(product);
        }
    }

    // Weights, and so their sums, are `lift` times as large. Rows that have `seen` no key are 0.
    __aicore__ inline void Finish(const Task& task, uint32_t i, float lift, RowBits seen)
    {
        const LaneTask& lane = task.lane[i];
        const uint32_t rows = OwnRows(lane.rows);
        if (rows == 0) return;
        const RowBits without_keys = RowsBetween(0, rows) & ~seen;  // fully masked rows
        RowMath all(0, rows), never(without_keys);
        const Row maximum = Number(i, kMaximum), sum = Number(i, kSum), frame = Number(i, kFrame);
        AscendC::PipeBarrier<PIPE_V>();
        never.Set(sum, 1.0f);
        for (uint32_t r = 0; without_keys != 0 && r < rows; ++r) {  // with a tiny scale, masked scores had weight
            if ((without_keys >> r & 1) != 0) {
                AscendC::Duplicate(Output(i)[r * t_.dim], 0.0f, static_cast<int32_t>(t_.dim));
            }
        }
        if (!kExact) all.Scale(frame, frame, t_.invariance);
        AscendC::PipeBarrier<PIPE_V>();
        all.Add(maximum, maximum, frame);
        all.Scale(Number(kSecond), sum, 1.0f / lift);
        if (!t_.has_sinks) Spread(spread_, sum, rows);
        AscendC::PipeBarrier<PIPE_V>();
        all.Logarithm(Number(kSecond), Number(kSecond));
        float sink = 0.0f;
        if (t_.has_sinks) {
            sink = sinks_.GetValue(task.head % t_.heads);
            all.Set(Number(kFirst), sink);
            TakeSink(all, maximum, sum, Number(kSecond), Number(kFirst), Number(kTop));
            Spread(spread_, sum, rows);
            AscendC::PipeBarrier<PIPE_V>();
        }
        StoreOutput(task, i, rows);  // with a barrier
        AscendC::LocalTensor<float> lse = row_out_.AllocTensor<float>();
        all.Add(lse, maximum, Number(kSecond));
        AscendC::PipeBarrier<PIPE_V>();
        if (t_.has_sinks && !task.padding) {
            never.Set(lse, sink);
        } else {
            never.SetBits(lse, kMinusInfinity);
        }
        StoreRow(lse_[FirstRow(task, lane)], lse, rows);
        if (kExact && t_.has_largest) {
            AscendC::LocalTensor<float> largest = row_out_.AllocTensor<float>();
            all.Add(largest, Number(kBest), frame);
            AscendC::PipeBarrier<PIPE_V>();
            never.SetBits(largest, kMinusInfinity);
            StoreRow(largest_[FirstRow(task, lane)], largest, rows);
        }
    }

    // A number of each row.
    __aicore__ inline void StoreRow(const AscendC::GlobalTensor<float>& to, AscendC::LocalTensor<float>& numbers,
                                    uint32_t rows)
    {
        row_out_.EnQue(numbers);
        numbers = row_out_.DeQue<float>();
        AscendC::DataCopyExtParams p;
        p.blockCount = 1;
        p.blockLen = rows * sizeof(float);
        AscendC::DataCopyPad(to, numbers, p);
        row_out_.FreeTensor(numbers);
    }

    // O / l, l being spread.
    __aicore__ inline void StoreOutput(const Task& task, uint32_t i, uint32_t rows)
    {
        RoundedRows rounding(t_, score_tile_, work_, Number(kFirst), Number(kThird), rows);
        for (uint32_t d = 0; d < t_.dim; d += kChunk) {
            const uint32_t width = Least(kChunk, t_.dim - d);
            HalfTile rounded = tile_out_.AllocTensor<half>();
            rounding.Make(rounded, Output(i)[d], spread_, d, width, kExact);
            tile_out_.EnQue(rounded);
            rounded = tile_out_.DeQue<half>();
            AscendC::DataCopyParams p;
            p.blockCount = rows;
            p.blockLen = width / kFractal;
            p.dstGap = (t_.dim - width) / kFractal;
            AscendC::DataCopy(out_[FirstRow(task, task.lane[i]) * t_.dim + d], rounded, p);
            tile_out_.FreeTensor(rounded);
        }
    }
};

}  // namespace pasa
