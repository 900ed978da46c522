// A vector core's part of decoding: K', and the softmax of half of the rows of a tile, whose scores are FP32.
#pragma once

#include "decode_output.h"

namespace pasa {

class DecodeVector : private DecodeOutput {
public:
    __aicore__ inline DecodeVector(const DecodeArguments& arguments, const DecodeTiling& tiling, AscendC::TPipe& pipe)
        : DecodeOutput(arguments, tiling, pipe)
    {
        const DecodeWorkspace& w = tiling.group_workspace;
        GM_ADDR at = workspace_ + group_ * w.bytes;
        for (uint32_t i = 0; i < 2; ++i) {
            scores_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + w.scores) + i * kDecodeRows * kBlockKeys);
            weights_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + w.weights) + i * kDecodeRows * kBlockKeys);
            product_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + w.product + i * w.product_bytes));
            sums_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + w.sums) + i * kDecodeRows * kFractal);
        }
        pipe.InitBuffer(sums_in_, 1, kDecodeHalf * kFractal * sizeof(float));
    }

    __aicore__ inline void Run()
    {
        Segment s;
        DecodeItem unfinished;
        uint32_t unfinished_rows = 0;
        tasks_.Begin(group_);
        while (tasks_.Next(s)) {
            const uint32_t rows = TakeRows(s.item);
            Attend(s, rows);
            if (rows == 0) continue;
            if (s.starts && s.ends) {
                Finish(s.item, rows);
                continue;
            }
            StorePart(s.starts, rows);
            if (s.starts) {  // the last segment of the group
                unfinished = s.item;
                unfinished_rows = rows;
            }
        }
        AscendC::SyncAll();
        if (unfinished_rows == 0) return;
        Merge(unfinished, unfinished_rows);
        Finish(unfinished, unfinished_rows);
    }

private:
    // How many rows of a tile are this core's: the first core has the larger half.
    __aicore__ inline uint32_t TakeRows(const DecodeItem& item)
    {
        const uint32_t rows = item.tokens * t_.group, half_rows = DivideUp<uint32_t>(rows, 2);
        skipped_ = AscendC::GetSubBlockIdx() * half_rows;
        return AscendC::GetSubBlockIdx() == 0 ? half_rows : rows - half_rows;
    }

    __aicore__ inline void Attend(const Segment& s, uint32_t rows)
    {
        if (rows > 0) BeginRows(rows);
        if (s.steps == 0) {
            AscendC::PipeBarrier<PIPE_V>();  // the segment before may have been one without keys, too
            AscendC::Duplicate(Columns(kFrame), 0.0f, a_.dim);
            return;
        }
        BeginKeys(s);
        for (uint32_t j = 0; j < s.steps; ++j) {
            AscendC::CrossCoreWaitFlag<kGroup>(kDecodeScoresReady + j % 2);
            if (rows > 0) MakeWeights(s, j, rows);
            AscendC::CrossCoreSetFlag<kGroup, PIPE_MTE3>(kDecodeWeightsReady + j % 2);
            if (j + 2 < s.steps) TakeKeys(s, j + 2);
            if (j == 0) continue;
            TakeProduct(j - 1, rows);
            if (rows > 0) {
                Rescale(rows);
            }
        }
        TakeProduct(s.steps - 1, rows);
    }

    // Weights of a block, rounded, to the cube core. kKeep becomes the factor of the output so far.
    __aicore__ inline void MakeWeights(const Segment& s, uint32_t j, uint32_t rows)
    {
        const uint32_t slot = j % 2, count = KeysOf(s, j);
        RowMath all(0, rows);
        const Row maximum = Number(kMaximum), next = Number(kNext), keep = Number(kKeep);
        FloatTile in = wide_in_.AllocTensor<float>();
        AscendC::DataCopy(in, scores_[slot][skipped_ * kBlockKeys], rows * kBlockKeys);
        wide_in_.EnQue(in);
        FollowFrame(s, j, rows);
        in = wide_in_.DeQue<float>();
        if (count < kBlockKeys) {  // there is nothing behind
            HideColumns(in, count, rows, 0.0f);
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::Muls(tile_, in, a_.scale, rows * kBlockKeys);
        wide_in_.FreeTensor(in);
        AscendC::PipeBarrier<PIPE_V>();
        Hide(s, j, rows);
        RowReduction<AscendC::ReduceType::MAX> top(work_, rows);
        top.Blocks(tile_);
        AscendC::PipeBarrier<PIPE_V>();
        top.Halves();
        AscendC::PipeBarrier<PIPE_V>();
        top.Finish(Number(kTop));
        AscendC::PipeBarrier<PIPE_V>();
        all.Larger(next, Number(kTop), maximum);
        AscendC::PipeBarrier<PIPE_V>();
        all.Subtract(keep, maximum, next);
        Spread(spread_, next, rows);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t part = 0; part < 2; ++part) {
            AscendC::Sub(tile_[part * kFloats], tile_[part * kFloats], spread_, kFloats, rows,
                         AscendC::BinaryRepeatParams(1, 1, 0, kTileBlocks, kTileBlocks, 1));
        }
        all.Exponential(keep, keep);
        all.Scale(maximum, next, 1.0f);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Exp(tile_, tile_, rows * kBlockKeys);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(tile_, tile_, kDecodeLift, rows * kBlockKeys);
        AscendC::PipeBarrier<PIPE_V>();
        HalfTile weights = tile_out_.AllocTensor<half>();
        AscendC::Cast(weights, tile_, AscendC::RoundMode::CAST_RINT, rows * kBlockKeys);
        tile_out_.EnQue(weights);
        weights = tile_out_.DeQue<half>();
        AscendC::DataCopy(weights_[slot][skipped_ * kBlockKeys], weights, rows * kBlockKeys);
        tile_out_.FreeTensor(weights);
    }

    // Scores of keys that do not exist, or that a row does not see, become kUnseen.
    __aicore__ inline void Hide(const Segment& s, uint32_t j, uint32_t rows)
    {
        const uint32_t first = (s.block + j) * kBlockKeys, count = KeysOf(s, j);
        const bool partial = a_.causal && s.item.first_sees < first + count;
        if (count == kBlockKeys && !partial) return;
        if (!partial) HideColumns(tile_, count, rows, kUnseen);
        for (uint32_t r = 0; r < rows && partial; ++r) {
            const int64_t seen = s.item.first_sees + (skipped_ + r) / t_.group - first;
            const uint32_t kept = seen <= 0 ? 0 : seen < count ? static_cast<uint32_t>(seen) : count;
            if (kept < kBlockKeys) HideColumns(tile_[r * kBlockKeys], kept, 1, kUnseen);
        }
        AscendC::PipeBarrier<PIPE_V>();
    }

    // O and l of a block, which the cube core has formed, onto those of the blocks before.
    __aicore__ inline void TakeProduct(uint32_t j, uint32_t rows)
    {
        const uint32_t slot = j % 2;
        AscendC::CrossCoreWaitFlag<kGroup>(kDecodeProductReady + slot);
        if (rows == 0) return;
        FloatTile sums = sums_in_.AllocTensor<float>();
        AscendC::DataCopy(sums, sums_[slot][skipped_ * kFractal], rows * kFractal);
        sums_in_.EnQue(sums);
        AddRows(product_[slot][skipped_ * a_.dim], rows, false);
        sums = sums_in_.DeQue<float>();
        // a sum stands in all 16 columns: its row's first number
        AscendC::ReduceRepeat<AscendC::ReduceType::MAX>(Number(kRowSum), sums, kFloatBlock, rows, 1, 1, 2,
                                                        AscendC::ReduceOrder::ORDER_ONLY_VALUE);
        sums_in_.FreeTensor(sums);
        AscendC::PipeBarrier<PIPE_V>();
        RowMath(0, rows).Add(Number(kSum), Number(kSum), Number(kRowSum));
        AscendC::PipeBarrier<PIPE_V>();
    }

    AscendC::GlobalTensor<float> scores_[2], product_[2], sums_[2];
    AscendC::GlobalTensor<half> weights_[2];
    AscendC::TQue<AscendC::TPosition::VECIN, 1> sums_in_;
};

}  // namespace pasa
