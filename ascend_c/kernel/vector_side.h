// A vector core's part of attention: softmax over half of the rows of a tile, statistics, reference and verdict.
#pragma once

#include "exact_rows.h"
#include "unbiased.h"

namespace pasa {

// A running maximum before the first key: below every score, which is below 2^43 units of at most 2^80 nats. Fully
// masked rows may find masked scores above it; their result is replaced at the end.
constexpr float kNothing = -0x1p125f;
constexpr uint32_t kMinusInfinity = 0xff800000;  // the device's headers have no INFINITY
// Weights are 2^15 exp(score - running maximum): within FP16, and zero only 27.7 nats below the maximum.
constexpr float kLift = 0x1p15f, kLiftNats = 10.39720771f;
constexpr float kLargestLifted = 64.0f;  // of a scale with which any FP16 score in nats minus kLiftNats is near enough

template <bool kExact>
class VectorSide : private ExactRows {
public:
    __aicore__ inline VectorSide(const Arguments& arguments, const AttentionTiling& tiling, AscendC::TPipe& pipe)
        : ExactRows(arguments, tiling, kExact, pipe)
    {
    }

    __aicore__ inline void Run()
    {
        Task task;
        for (uint32_t turn = 0; tasks_.Get(turn, Group(), AscendC::GetBlockNum(), task); ++turn) {
            for (uint32_t i = 0; i < kLanes; ++i) Begin(task, i);
            for (uint32_t j = 0; j <= task.steps; ++j) {  // a lane's product is made during the other lane's softmax
                if (j < task.lane[0].steps) TakeScores(task, 0, j);
                if (j > 0 && j <= task.lane[1].steps) TakeProduct(task, 1);
                if (j < task.lane[1].steps) TakeScores(task, 1, j);
                if (j < task.lane[0].steps) TakeProduct(task, 0);
            }
            for (uint32_t i = 0; i < kLanes; ++i) Finish(task, i);
        }
    }

private:
    __aicore__ inline void Begin(const Task& task, uint32_t i)
    {
        const LaneTask& lane = task.lane[i];
        const uint32_t rows = OwnRows(lane.Computed());
        if (lane.rows == 0) return;
        if (rows > 0) {
            RowMath all(0, rows);
            all.Set(Number(i, kMaximum), kNothing);
            all.Set(Number(i, kSum), 0.0f);
            all.Set(Number(i, kFrame), 0.0f);
            all.Set(Number(i, kOffset), 0.0f);
            AscendC::Duplicate(Output(i), 0.0f, rows * t_.dim);
            AscendC::PipeBarrier<PIPE_V>();
        }
        if (!kExact || lane.steps == 0) return;
        AscendC::CrossCoreWaitFlag<kGroup>(kProductReady + i);
        if (rows > 0) FirstReference(task, i, rows);
        AscendC::CrossCoreSetFlag<kGroup, PIPE_MTE3>(kWeightsReady + i);
    }

    // ---- one score tile: weights for the cube core, statistics for here

    __aicore__ inline void TakeScores(const Task& task, uint32_t i, uint32_t j)
    {
        const LaneTask& lane = task.lane[i];
        const uint32_t rows = OwnRows(lane.Computed());
        AscendC::CrossCoreWaitFlag<kGroup>(kScoresReady + i);
        if (rows == 0) {
            if (kExact) {
                TellVerdict(i, false);
                AscendC::CrossCoreWaitFlag<kGroup>(kWideReady + i);
            }
            AscendC::CrossCoreSetFlag<kGroup, PIPE_MTE3>(kWeightsReady + i);
            return;
        }
        const bool refers = kExact && j + 1 < lane.steps;
        if (refers) LoadOffsets(task, i, j + 1, rows);
        const uint32_t without_keys = RowsWithoutKeys(task, lane, j, rows);
        RowMath seeing(without_keys, rows);
        if (kExact && without_keys > 0) RowMath(0, without_keys).Set(Number(kFirst), 0.0f);  // for Judge
        LoadScores(task, i, j, rows);
        bool wide = false;
        if (kExact) {
            wide = ToFrame(task, i, j, rows, seeing, refers);
        } else {
            MoveFrame(i, j, rows, seeing);
        }
        NextReference next = refers ? Reference(i, rows, false) : NextReference();
        MakeWeights(i, rows, wide, next);
        if (kExact && !wide) AscendC::CrossCoreWaitFlag<kGroup>(kWideReady + i);
        AscendC::CrossCoreSetFlag<kGroup, PIPE_MTE3>(kWeightsReady + i);
    }

    // Write the score tile in FP32 to score_tile_, with masked scores replaced, and the largest of each row to kTop.
    __aicore__ inline void LoadScores(const Task& task, uint32_t i, uint32_t j, uint32_t rows)
    {
        HalfTile narrow = narrow_in_.AllocTensor<half>();
        AscendC::DataCopy(narrow, scores_[i], rows * kBlockKeys);
        narrow_in_.EnQue(narrow);
        narrow = narrow_in_.DeQue<half>();
        const uint32_t count = KeysOf(task, j);
        if (kExact && count < kBlockKeys) {  // there is nothing behind; as published, what fills the block
            HideColumns(narrow, count, rows, 0.0f);
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::Cast(score_tile_, narrow, AscendC::RoundMode::CAST_NONE, rows * kBlockKeys);
        narrow_in_.FreeTensor(narrow);
        AscendC::PipeBarrier<PIPE_V>();
        RowReduction<AscendC::ReduceType::SUM> mean(mean_work_, rows);
        if (!kExact) mean.Blocks(score_tile_);  // of the whole block, seen or not
        Hide(task, i, j, rows, score_tile_);
        RowReduction<AscendC::ReduceType::MAX> top(work_, rows);
        top.Blocks(score_tile_);
        AscendC::PipeBarrier<PIPE_V>();
        if (!kExact) mean.Halves();
        top.Halves();
        AscendC::PipeBarrier<PIPE_V>();
        if (!kExact) mean.Finish(Number(kThird));
        top.Finish(Number(kTop));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Weights, rounded, to the cube core; m, l, and the output so far in the frame of the new maximum (Algorithm 1,
    // lines 12 and 16 to 20, but weights are relative to the running maximum: P V needs no factor). Before it, kTop
    // holds the largest scores in nats, kHere the same in the frame of the running maximum, and kCarried what the
    // next block's frame adds to that.
    __aicore__ inline void MakeWeights(uint32_t i, uint32_t rows, bool wide, NextReference& next)
    {
        RowMath all(0, rows);
        const Row maximum = Number(i, kMaximum), sum = Number(i, kSum), offset = Number(i, kOffset), top = Number(kTop);
        const Row shift = Number(kHere), larger = Number(kLarger), keep = Number(kKeep), row_sum = Number(kRowSum);
        const Row carried = next.IsDone() ? larger : Number(kCarried);  // into the frame of the next block
        // the running maximum, and the same in the frame of the tile: not below what the tile holds, whatever rounding
        // does to large offsets
        all.Larger(larger, maximum, Number(kHere));
        all.Subtract(row_sum, maximum, offset);
        AscendC::PipeBarrier<PIPE_V>();
        all.Larger(shift, row_sum, top);
        all.Subtract(keep, maximum, larger);
        if (!next.IsDone()) {
            all.Add(carried, carried, larger);
        }
        AscendC::PipeBarrier<PIPE_V>();
        const bool late = wide || t_.scale > kLargestLifted;  // a score in FP32 may be too large to subtract a few nats
        if (!late) {
            all.Lower(shift, shift, kLiftNats);
            next.Step();
            AscendC::PipeBarrier<PIPE_V>();
        }
        // scores to weights
        Spread(spread_, shift, rows);
        all.Exponential(keep, keep);
        all.Scale(maximum, carried, 1.0f);
        next.Step();
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t part = 0; part < 2; ++part) {
            AscendC::Sub(score_tile_[part * kFloats], score_tile_[part * kFloats], spread_, kFloats, rows,
                         AscendC::BinaryRepeatParams(1, 1, 0, kTileBlocks, kTileBlocks, 1));
        }
        all.Multiply(sum, sum, keep);
        next.Step();
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Exp(score_tile_, score_tile_, rows * kBlockKeys);
        Spread(spread_, keep, rows);
        next.Step();
        AscendC::PipeBarrier<PIPE_V>();
        if (late) {
            AscendC::Muls(score_tile_, score_tile_, kLift, rows * kBlockKeys);
            AscendC::PipeBarrier<PIPE_V>();
        }
        HalfTile weights = tile_out_.AllocTensor<half>();
        AscendC::Cast(weights, score_tile_, AscendC::RoundMode::CAST_RINT, rows * kBlockKeys);
        ScaleOutput(i, rows);
        next.Step();
        tile_out_.EnQue(weights);
        weights = tile_out_.DeQue<half>();
        AscendC::DataCopy(weights_[i], weights, rows * kBlockKeys);
        // their sums
        if (kExact) {  // the sum of what multiplies V, so that the output is a mean of values
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Cast(score_tile_, weights, AscendC::RoundMode::CAST_NONE, rows * kBlockKeys);
            next.Step();
            AscendC::PipeBarrier<PIPE_V>();
        }
        RowReduction<AscendC::ReduceType::SUM> weight(work_, rows);
        weight.Blocks(score_tile_);
        next.Step();
        AscendC::PipeBarrier<PIPE_V>();
        tile_out_.FreeTensor(weights);
        weight.Halves();
        next.Step();
        AscendC::PipeBarrier<PIPE_V>();
        weight.Finish(row_sum);
        next.Step();
        AscendC::PipeBarrier<PIPE_V>();
        all.Add(sum, sum, row_sum);
        StoreReference(i, rows, next);
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

    // ---- published recovery: the moving frame (Algorithm 1, lines 13 to 17)

    // F_j = s / j + F_{j-1} (j-1) / j, the offset of this tile, and the running maximum carried into the frame; the
    // largest of each row to kHere. The sum of S' is in kThird. A row that sees nothing keeps its frame.
    __aicore__ inline void MoveFrame(uint32_t i, uint32_t j, uint32_t rows, RowMath& seeing)
    {
        const Row mean = Number(kThird), carry = Number(kSecond), current = Number(kFirst);
        const Row frame = Number(i, kFrame), offset = Number(i, kOffset), maximum = Number(i, kMaximum);
        seeing.Scale(mean, mean, 1.0f / kBlockKeys);
        seeing.Scale(current, frame, static_cast<float>(j) / (j + 1));
        AscendC::PipeBarrier<PIPE_V>();
        seeing.Scale(carry, mean, 1.0f / (j + 1));
        AscendC::PipeBarrier<PIPE_V>();
        seeing.Add(current, carry, current);
        AscendC::PipeBarrier<PIPE_V>();
        seeing.Subtract(carry, frame, current);
        seeing.Subtract(offset, mean, current);
        AscendC::PipeBarrier<PIPE_V>();
        seeing.Scale(carry, carry, j == 0 ? 0.0f : t_.invariance);
        seeing.Scale(offset, offset, t_.invariance);
        seeing.Scale(frame, current, 1.0f);
        AscendC::PipeBarrier<PIPE_V>();
        seeing.Add(maximum, maximum, carry);
        RowMath(0, rows).Add(Number(kHere), Number(kTop), offset);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // ---- output

    // O = O + P V.
    __aicore__ inline void TakeProduct(const Task& task, uint32_t i)
    {
        const uint32_t rows = OwnRows(task.lane[i].Computed());
        AscendC::CrossCoreWaitFlag<kGroup>(kProductReady + i);
        if (rows == 0) return;
        for (uint32_t d = 0; d < t_.dim; d += kChunk) {
            const uint32_t width = Least(kChunk, t_.dim - d);
            FloatTile product = wide_in_.AllocTensor<float>();
            AscendC::DataCopyParams p;
            p.blockCount = rows;
            p.blockLen = width / kFloatBlock;
            p.srcGap = (t_.dim - width) / kFloatBlock;
            AscendC::DataCopy(product, product_[i][d], p);
            wide_in_.EnQue(product);
            product = wide_in_.DeQue<float>();
            const FloatTile out = Output(i)[d];
            for (uint32_t c = 0; c < width; c += kFloats) {
                AscendC::Add(out[c], out[c], product[c], Least(kFloats, width - c), rows,
                             AscendC::BinaryRepeatParams(1, 1, 1, t_.dim / kFloatBlock, t_.dim / kFloatBlock,
                                                         width / kFloatBlock));
            }
            wide_in_.FreeTensor(product);
        }
    }

    __aicore__ inline void Finish(const Task& task, uint32_t i)
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
        all.Scale(Number(kSecond), sum, 1.0f / kLift);
        Spread(spread_, sum, rows);
        AscendC::PipeBarrier<PIPE_V>();
        all.Logarithm(Number(kSecond), Number(kSecond));
        StoreOutput(task, i, rows);  // with a barrier
        AscendC::LocalTensor<float> lse = row_out_.AllocTensor<float>();
        all.Add(lse, maximum, Number(kSecond));
        AscendC::PipeBarrier<PIPE_V>();
        never.SetBits(lse, kMinusInfinity);
        row_out_.EnQue(lse);
        lse = row_out_.DeQue<float>();
        AscendC::DataCopyExtParams p;
        p.blockCount = 1;
        p.blockLen = rows * sizeof(float);
        AscendC::DataCopyPad(lse_[FirstRow(task, lane)], lse, p);
        row_out_.FreeTensor(lse);
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
