// A vector core's part of attention by the published recovery: softmax over half of the rows of a tile, statistics.
#pragma once

#include "output_rows.h"

namespace pasa {

// Weights are 2^15 exp(score - running maximum): within FP16, and zero only 27.7 nats below the maximum.
constexpr float kPaperLift = 0x1p15f, kPaperLiftNats = 10.39720771f;

class PaperVector : private OutputRows<false> {
public:
    __aicore__ inline PaperVector(const Arguments& arguments, const AttentionTiling& tiling, AscendC::TPipe& pipe)
        : OutputRows(arguments, tiling, false, pipe)
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
            for (uint32_t i = 0; i < kLanes; ++i) {
                const uint32_t rows = OwnRows(task.lane[i].rows);
                Finish(task, i, kPaperLift, RowsBetween(RowsWithoutKeys(task, task.lane[i], 0, rows), rows));
            }
        }
    }

private:
    __aicore__ inline void Begin(const Task& task, uint32_t i)
    {
        const LaneTask& lane = task.lane[i];
        const uint32_t rows = OwnRows(lane.rows == 0 ? 0 : lane.Computed());
        if (rows == 0) return;
        RowMath all(0, rows);
        all.Set(Number(i, kMaximum), kNothing);
        all.Set(Number(i, kSum), 0.0f);
        all.Set(Number(i, kFrame), 0.0f);
        all.Set(Number(i, kOffset), 0.0f);
        AscendC::Duplicate(Output(i), 0.0f, rows * t_.dim);
    }

    // ---- one score tile: weights for the cube core, statistics for here

    __aicore__ inline void TakeScores(const Task& task, uint32_t i, uint32_t j)
    {
        const LaneTask& lane = task.lane[i];
        const uint32_t rows = OwnRows(lane.Computed());
        AscendC::CrossCoreWaitFlag<kGroup>(kScoresReady + i);
        if (rows > 0) {
            RowMath seeing(RowsWithoutKeys(task, lane, j, rows), rows);
            LoadScores(task, i, j, rows);
            MoveFrame(i, j, rows, seeing);
            MakeWeights(i, rows);
        }
        AscendC::CrossCoreSetFlag<kGroup, PIPE_MTE3>(kWeightsReady + i);
    }

    // O = O + P V.
    __aicore__ inline void TakeProduct(const Task& task, uint32_t i)
    {
        AscendC::CrossCoreWaitFlag<kGroup>(kProductReady + i);
        const uint32_t rows = OwnRows(task.lane[i].Computed());
        if (rows > 0) AddProduct(i, i, rows);
    }

    // Write the score tile in FP32 to score_tile_, with masked scores replaced, and the largest of each row to kTop.
    __aicore__ inline void LoadScores(const Task& task, uint32_t i, uint32_t j, uint32_t rows)
    {
        HalfTile narrow = narrow_in_.AllocTensor<half>();
        AscendC::DataCopy(narrow, scores_[i], rows * kBlockKeys);
        narrow_in_.EnQue(narrow);
        narrow = narrow_in_.DeQue<half>();
        AscendC::Cast(score_tile_, narrow, AscendC::RoundMode::CAST_NONE, rows * kBlockKeys);
        narrow_in_.FreeTensor(narrow);
        AscendC::PipeBarrier<PIPE_V>();
        RowReduction<AscendC::ReduceType::SUM> mean(mean_work_, rows);
        mean.Blocks(score_tile_);  // of the whole block, seen or not
        Hide(task, i, j, rows, score_tile_);
        RowReduction<AscendC::ReduceType::MAX> top(work_, rows);
        top.Blocks(score_tile_);
        AscendC::PipeBarrier<PIPE_V>();
        mean.Halves();
        top.Halves();
        AscendC::PipeBarrier<PIPE_V>();
        mean.Finish(Number(kThird));
        top.Finish(Number(kTop));
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Weights, rounded, to the cube core; m, l, and the output so far relative to the new maximum (Algorithm 1, lines
    // 12 and 16 to 20, but weights are relative to the running maximum: P V needs no factor). Before it, kTop holds the
    // largest scores, and kHere the same in the frame of the running maximum.
    __aicore__ inline void MakeWeights(uint32_t i, uint32_t rows)
    {
        RowMath all(0, rows);
        const Row maximum = Number(i, kMaximum), sum = Number(i, kSum), offset = Number(i, kOffset), top = Number(kTop);
        const Row shift = Number(kHere), larger = Number(kLarger), keep = Number(kKeep), row_sum = Number(kRowSum);
        // the running maximum, and the same in the frame of the tile: not below what the tile holds, whatever rounding
        // does to large offsets
        all.Larger(larger, maximum, Number(kHere));
        all.Subtract(row_sum, maximum, offset);
        AscendC::PipeBarrier<PIPE_V>();
        all.Larger(shift, row_sum, top);
        all.Subtract(keep, maximum, larger);
        AscendC::PipeBarrier<PIPE_V>();
        const bool late = t_.scale > kLargestLifted;
        if (!late) {
            all.Lower(shift, shift, kPaperLiftNats);
            AscendC::PipeBarrier<PIPE_V>();
        }
        // scores to weights
        Spread(spread_, shift, rows);
        all.Exponential(keep, keep);
        all.Scale(maximum, larger, 1.0f);
        AscendC::PipeBarrier<PIPE_V>();
        SubtractSpread(rows);
        all.Multiply(sum, sum, keep);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Exp(score_tile_, score_tile_, rows * kBlockKeys);
        Spread(spread_, keep, rows);
        AscendC::PipeBarrier<PIPE_V>();
        if (late) {
            AscendC::Muls(score_tile_, score_tile_, kPaperLift, rows * kBlockKeys);
            AscendC::PipeBarrier<PIPE_V>();
        }
        HalfTile weights = tile_out_.AllocTensor<half>();
        AscendC::Cast(weights, score_tile_, AscendC::RoundMode::CAST_RINT, rows * kBlockKeys);
        ScaleOutput(i, rows);
        tile_out_.EnQue(weights);
        weights = tile_out_.DeQue<half>();
        AscendC::DataCopy(weights_[i], weights, rows * kBlockKeys);
        // their sums
        RowReduction<AscendC::ReduceType::SUM> weight(work_, rows);
        weight.Blocks(score_tile_);
        AscendC::PipeBarrier<PIPE_V>();
        tile_out_.FreeTensor(weights);
        weight.Halves();
        AscendC::PipeBarrier<PIPE_V>();
        weight.Finish(row_sum);
        AscendC::PipeBarrier<PIPE_V>();
        all.Add(sum, sum, row_sum);
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

};

}  // namespace pasa
