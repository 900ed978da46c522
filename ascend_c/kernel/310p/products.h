// The cube unit's part of attention on an Ascend 310P: S' = Q K'^T, P V and P 1, and the products of the anchors. They
// are FP32 in L0C, from where the vector unit copies them to UB.
#pragma once

#include "../arguments.h"
#include "../multiply.h"
#include "../task.h"

namespace pasa {

constexpr uint32_t kAnchorRows = 64;                 // whose products are in UB at a time
constexpr uint32_t kAnchorBlocks = kAnchorRows / 2;  // the blocks of keys that they are of

class Products {
public:
    using Tile = AscendC::LocalTensor<half>;
    using Accumulator = AscendC::LocalTensor<float>;

    __aicore__ inline Products(const Arguments& arguments, const AttentionTiling& tiling, const Tasks& tasks,
                               AscendC::TPipe& pipe)
        : t_(tiling),
          tasks_(tasks),
          pipe_(pipe),
          multiplier_(pipe)
    {
        q_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.q));
        keys_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.keys));
        v_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.v));
        anchors_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.anchors));
        pipe.InitBuffer(query_tiles_, 1, HalfTileNumbers(tiling.dim) * sizeof(half));
        pipe.InitBuffer(anchor_tiles_, 1, HalfTileNumbers(tiling.dim) * sizeof(half));
        pipe.InitBuffer(step_tiles_, 3, 2 * kBlockKeys * tiling.dim * sizeof(half));
        pipe.InitBuffer(weight_buffer_, HalfTileNumbers(kBlockKeys) * sizeof(half));
        pipe.InitBuffer(scores_, 2, kHalfRows * kBlockKeys * sizeof(float));
        pipe.InitBuffer(offsets_, 1, kAnchorRows * kHalfRows * sizeof(float));
        pipe.InitBuffer(outputs_, 2, kHalfRows * (tiling.dim + kFractal) * sizeof(float));
        weights_ = weight_buffer_.Get<half>();
        stored_ = pipe.AllocEventID<AscendC::HardEvent::MTE3_MTE1>();
        loaded_ = pipe.AllocEventID<AscendC::HardEvent::MTE1_MTE3>();
        AscendC::SetFlag<AscendC::HardEvent::MTE1_MTE3>(loaded_);
    }

    // After the last task.
    __aicore__ inline void Close()
    {
        AscendC::WaitFlag<AscendC::HardEvent::MTE1_MTE3>(loaded_);
        pipe_.ReleaseEventID<AscendC::HardEvent::MTE3_MTE1>(stored_);
        pipe_.ReleaseEventID<AscendC::HardEvent::MTE1_MTE3>(loaded_);
    }

    // Load the queries of a task, and form the scores of its first block.
    __aicore__ inline void Begin(const Task& task, uint32_t rows)
    {
        rows_ = rows;
        const uint64_t first = static_cast<uint64_t>(task.head) * RoundUp(t_.rows, kFractal) + task.lane[0].first_row;
        Tile tile = query_tiles_.AllocTensor<half>();
        LoadRows(tile, q_[first * t_.dim], rows);
        query_tiles_.EnQue(tile);
        queries_ = query_tiles_.DeQue<half>();
        LoadStep(task, 0);
        Advance(task, 0);
    }
    __aicore__ inline void End() { query_tiles_.FreeTensor(queries_); }

    // Form the scores of step j, and load the block of step j + 1.
    __aicore__ inline void Advance(const Task& task, uint32_t j)
    {
        steps_[j % 2] = step_tiles_.DeQue<half>();
        if (j + 1 < task.steps) LoadStep(task, j + 1);
        const uint32_t keys = RoundUp(KeysOfStep(task, j), kFractal);
        Accumulator c = scores_.AllocTensor<float>();
        for (uint32_t d = 0; d < t_.dim; d += kChunk) {
            const Factors f{rows_, keys, Least(kChunk, t_.dim - d), true, d > 0};
            const uint32_t column = d / kFractal * kColumnBlock;
            multiplier_.Multiply(c, queries_[column], steps_[j % 2][column], f);
        }
        scores_.EnQue(c);
    }
    // S' (keys / 16, rows, 16) of the next step.
    __aicore__ inline Accumulator TakeScores() { return scores_.DeQue<float>(); }
    __aicore__ inline void FreeScores(Accumulator& c) { scores_.FreeTensor(c); }

    // Products of the anchor rows of the next blocks and the queries: (rows / 16, `anchor_rows` rounded to 16, 16).
    __aicore__ inline Accumulator MakeOffsets(const Task& task, uint32_t block, uint32_t anchor_rows)
    {
        const uint64_t row = static_cast<uint64_t>(task.kv_head) * 2 * t_.blocks + 2 * block;
        Tile anchors = anchor_tiles_.AllocTensor<half>();
        LoadRows(anchors, anchors_[row * t_.dim], anchor_rows);
        anchor_tiles_.EnQue(anchors);
        anchors = anchor_tiles_.DeQue<half>();
        Accumulator c = offsets_.AllocTensor<float>();
        for (uint32_t d = 0; d < t_.dim; d += kChunk) {
            const Factors f{anchor_rows, rows_, Least(kChunk, t_.dim - d), true, d > 0};
            const uint32_t column = d / kFractal * kColumnBlock;
            multiplier_.Multiply(c, anchors[column], queries_[column], f);
        }
        anchor_tiles_.FreeTensor(anchors);
        offsets_.EnQue(c);
        return offsets_.DeQue<float>();
    }
    __aicore__ inline void FreeOffsets(Accumulator& c) { offsets_.FreeTensor(c); }

    // Weights (128 / 16, rows, 16) of step j from UB to L1.
    __aicore__ inline void StoreWeights(const Task& task, uint32_t j, const Tile& weights)
    {
        AscendC::DataCopyParams p;
        p.blockCount = DivideUp(KeysOfStep(task, j), kFractal);
        p.blockLen = rows_;
        p.dstGap = kTileRows - rows_;
        AscendC::WaitFlag<AscendC::HardEvent::MTE1_MTE3>(loaded_);
        AscendC::DataCopy(weights_, weights, p);
        AscendC::SetFlag<AscendC::HardEvent::MTE3_MTE1>(stored_);
    }

    // P V of step j, and behind it P 1, the sum of each row sixteen times: (D / 16 + 1, rows, 16).
    __aicore__ inline void MakeProduct(const Task& task, uint32_t j)
    {
        const uint32_t keys = RoundUp(KeysOfStep(task, j), kFractal);
        AscendC::WaitFlag<AscendC::HardEvent::MTE3_MTE1>(stored_);
        Tile left = multiplier_.TakeLeft(weights_, rows_, keys);
        AscendC::SetFlag<AscendC::HardEvent::MTE1_MTE3>(loaded_);
        Accumulator c = outputs_.AllocTensor<float>();
        for (uint32_t d = 0; d < t_.dim; d += kChunk) {
            const Factors f{rows_, Least(kChunk, t_.dim - d), keys, false, false};
            Tile right = multiplier_.TakeRight(steps_[j % 2][kBlockKeys * t_.dim + d / kFractal * kColumnBlock], f);
            multiplier_.Contract(c[d * rows_], left, right, f);
            multiplier_.FreeRight(right);
        }
        Tile ones = multiplier_.TakeNumber(static_cast<half>(1.0f), keys, kFractal);
        multiplier_.Contract(c[t_.dim * rows_], left, ones, Factors{rows_, kFractal, keys, false, false});
        multiplier_.FreeRight(ones);
        multiplier_.FreeLeft(left);
        step_tiles_.FreeTensor(steps_[j % 2]);
        outputs_.EnQue(c);
    }
    // What MakeProduct made.
    __aicore__ inline Accumulator TakeProduct() { return outputs_.DeQue<float>(); }
    __aicore__ inline void FreeProduct(Accumulator& c) { outputs_.FreeTensor(c); }

private:
    __aicore__ inline uint32_t KeysOfStep(const Task& task, uint32_t j) const
    {
        return Least(kBlockKeys, task.keys - tasks_.Block(task, j) * kBlockKeys);
    }

    // A row-major matrix in memory to a tile of fractals, in pieces of 32 bytes.
    __aicore__ inline void LoadRows(const Tile& tile, const AscendC::GlobalTensor<half>& from, uint32_t rows)
    {
        AscendC::DataCopyParams p;
        p.blockCount = rows;
        p.blockLen = 1;
        p.srcGap = t_.dim / kFractal - 1;
        for (uint32_t d = 0; d < t_.dim; d += kFractal) {
            AscendC::DataCopy(tile[d / kFractal * kColumnBlock], from[d], p);
        }
    }

    // Keys of the block of step j, and behind them its values: both lie in memory as fractals.
    __aicore__ inline void LoadStep(const Task& task, uint32_t j)
    {
        const uint64_t place = (static_cast<uint64_t>(task.kv_head) * t_.blocks + tasks_.Block(task, j)) * kBlockKeys * t_.dim;
        AscendC::DataCopyParams p;
        p.blockCount = t_.dim / kFractal;
        p.blockLen = RoundUp(KeysOfStep(task, j), kFractal);
        p.srcGap = kBlockKeys - p.blockLen;
        p.dstGap = kBlockKeys - p.blockLen;
        Tile step = step_tiles_.AllocTensor<half>();
        AscendC::DataCopy(step, keys_[place], p);
        AscendC::DataCopy(step[kBlockKeys * t_.dim], v_[place], p);
        step_tiles_.EnQue(step);
    }

    const AttentionTiling& t_;
    const Tasks& tasks_;
    AscendC::TPipe& pipe_;
    AscendC::GlobalTensor<half> q_, keys_, v_, anchors_;
    AscendC::TQue<AscendC::TPosition::A1, 1> query_tiles_, anchor_tiles_, step_tiles_;
    AscendC::TBuf<AscendC::TPosition::A1> weight_buffer_;
    AscendC::TQue<AscendC::TPosition::CO1, 1> scores_, offsets_, outputs_;
    Multiplier multiplier_;
    Tile queries_, steps_[2], weights_;
    AscendC::TEventID stored_, loaded_;  // weights are in L1; they may be overwritten there
    uint32_t rows_ = 0;
};

}  // namespace pasa
