// The output of a vector core's rows: products added up, divided, rounded and stored.
#pragma once

#include "unbiased.h"
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

    // Weights, and so their sums, are `lift` times as large.
    __aicore__ inline void Finish(const Task& task, uint32_t i, float lift)
    {
        const LaneTask& lane = task.lane[i];
        const uint32_t rows = OwnRows(lane.rows);
        if (rows == 0) return;
        const uint32_t without_keys = RowsWithoutKeys(task, lane, 0, rows);  // fully masked rows
        RowMath all(0, rows), never(0, without_keys);
        const Row maximum = Number(i, kMaximum), sum = Number(i, kSum), frame = Number(i, kFrame);
        AscendC::PipeBarrier<PIPE_V>();
        never.Set(sum, 1.0f);
        if (without_keys > 0) {  // with a tiny scale, masked scores had weight
            AscendC::Duplicate(Output(i), 0.0f, without_keys * t_.dim);
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
            BesideSink(i, rows, sink);
        }
        StoreOutput(task, i, rows);  // with a barrier
        AscendC::LocalTensor<float> lse = row_out_.AllocTensor<float>();
        all.Add(lse, maximum, Number(kSecond));
        AscendC::PipeBarrier<PIPE_V>();
        if (t_.has_sinks) {
            never.Set(lse, sink);
        } else {
            never.SetBits(lse, kMinusInfinity);
        }
        row_out_.EnQue(lse);
        lse = row_out_.DeQue<float>();
        AscendC::DataCopyExtParams p;
        p.blockCount = 1;
        p.blockLen = rows * sizeof(float);
        AscendC::DataCopyPad(lse_[FirstRow(task, lane)], lse, p);
        row_out_.FreeTensor(lse);
    }

    // One more score, whose value is 0. Let L = maximum + kSecond. Then l becomes l (1 + exp(sink - L)), which divides O;
    // maximum and kSecond become max(L, sink) and ln(1 + exp(-|L - sink|)), the two terms of the new L.
    __aicore__ inline void BesideSink(uint32_t i, uint32_t rows, float sink)
    {
        RowMath all(0, rows);
        const Row maximum = Number(i, kMaximum), sum = Number(i, kSum), apart = Number(kTop), nearer = Number(kSecond);
        AscendC::PipeBarrier<PIPE_V>();
        all.Add(maximum, maximum, nearer);
        AscendC::PipeBarrier<PIPE_V>();
        all.Lower(apart, maximum, sink);
        all.AtLeast(maximum, maximum, sink);
        AscendC::PipeBarrier<PIPE_V>();
        all.Absolute(nearer, apart);
        all.Scale(apart, apart, -1.0f);
        AscendC::PipeBarrier<PIPE_V>();
        all.Scale(nearer, nearer, -1.0f);
        all.Exponential(apart, apart);
        AscendC::PipeBarrier<PIPE_V>();
        all.Exponential(nearer, nearer);
        all.Lower(apart, apart, -1.0f);
        AscendC::PipeBarrier<PIPE_V>();
        all.Lower(nearer, nearer, -1.0f);
        all.Multiply(sum, sum, apart);
        AscendC::PipeBarrier<PIPE_V>();
        all.Logarithm(nearer, nearer);
        Spread(spread_, sum, rows);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // O / l, l being spread.
    __aicore__ inline void StoreOutput(const Task& task, uint32_t i, uint32_t rows)
    {
        UnbiasedRounding unbiased(t_, score_tile_, work_, Number(kFirst), Number(kThird), rows);
        bool drawn = false;
        for (uint32_t d = 0; d < t_.dim; d += kChunk) {
            const uint32_t width = Least(kChunk, t_.dim - d);
            const FloatTile out = Output(i)[d];
            const uint32_t stride = t_.dim / kFloatBlock;
            for (uint32_t c = 0; c < width; c += kFloats) {
                AscendC::Div(out[c], out[c], spread_, Least(kFloats, width - c), rows,
                             AscendC::BinaryRepeatParams(1, 1, 0, stride, stride, 1));
            }
            AscendC::PipeBarrier<PIPE_V>();
            if (kExact) WithinRange(out, width, rows);
            if (d == 0 && t_.unbiased_columns > 0) drawn = unbiased.FlagRows(out);
            if (drawn) unbiased.Draw(out, d, width);
            HalfTile rounded = tile_out_.AllocTensor<half>();
            if (t_.to_bf16) {
                Round(rounded.ReinterpretCast<bfloat16_t>(), out, width, rows);
            } else {
                Round(rounded, out, width, rows);
            }
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

    // A mean fits wherever its values do, but O and l are rounded on their own: a few thousand roundings may carry 65504
    // past 65520, where infinity begins. x becomes its nearest number in FP16's range, plus 0 x: NaN where it is not
    // finite, and a zero keeps its sign.
    __aicore__ inline void WithinRange(const FloatTile& out, uint32_t width, uint32_t rows)
    {
        const uint32_t stride = t_.dim / kFloatBlock;
        for (uint32_t c = 0; c < width; c += kFloats) {
            const uint32_t part = Least(kFloats, width - c);
            const AscendC::UnaryRepeatParams in_place(1, 1, kTileBlocks, kTileBlocks);
            AscendC::Mins(score_tile_, out[c], kHalfLargest, part, rows,
                          AscendC::UnaryRepeatParams(1, 1, kTileBlocks, stride));
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Maxs(score_tile_, score_tile_, -kHalfLargest, part, rows, in_place);
            AscendC::Muls(out[c], out[c], 0.0f, part, rows, AscendC::UnaryRepeatParams(1, 1, stride, stride));
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Add(out[c], out[c], score_tile_, part, rows,
                         AscendC::BinaryRepeatParams(1, 1, 1, stride, stride, kTileBlocks));
            AscendC::PipeBarrier<PIPE_V>();
        }
    }

    // Columns of the output to nearest.
    template <typename T>
    __aicore__ inline void Round(const AscendC::LocalTensor<T>& to, const FloatTile& out, uint32_t width, uint32_t rows)
    {
        for (uint32_t c = 0; c < width; c += kFloats) {
            AscendC::Cast(to[c], out[c], AscendC::RoundMode::CAST_RINT, Least(kFloats, width - c), rows,
                          AscendC::UnaryRepeatParams(1, 1, width / kFractal, t_.dim / kFloatBlock));
        }
    }
};

}  // namespace pasa
