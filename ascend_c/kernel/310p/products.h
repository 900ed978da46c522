// Products of a task of attention on an Ascend 310P, whose K' and V lie in memory as fractals.
#pragma once

#include "../arguments.h"
#include "../task.h"
#include "core_products.h"

namespace pasa {

constexpr uint32_t kAnchorRows = 64;                 // whose products are in UB at a time
constexpr uint32_t kAnchorBlocks = kAnchorRows / 2;  // the blocks of keys that they are of

class Products : public CoreProducts {
public:
    __aicore__ inline Products(const Arguments& arguments, const AttentionTiling& tiling, const Tasks& tasks,
                               AscendC::TPipe& pipe)
        : CoreProducts(tiling.dim, kAnchorRows, pipe),
          t_(tiling),
          tasks_(tasks)
    {
        q_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.q));
        keys_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.keys));
        v_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.v));
        anchors_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.anchors));
        pipe.InitBuffer(query_tiles_, 1, HalfTileNumbers(tiling.dim) * sizeof(half));
        pipe.InitBuffer(anchor_tiles_, 1, HalfTileNumbers(tiling.dim) * sizeof(half));
        pipe.InitBuffer(step_tiles_, 3, 2 * kBlockKeys * tiling.dim * sizeof(half));
    }

    // Load the queries of a task, and form the scores of its first block.
    __aicore__ inline void Begin(const Task& task, uint32_t rows)
    {
        rows_ = rows;
        const uint64_t first = static_cast<uint64_t>(task.head) * RoundUp(t_.rows, kFractal) + task.lane[0].first_row;
        Tile tile = query_tiles_.AllocTensor<half>();
        LoadPieces(tile, q_[first * t_.dim], rows, t_.dim);
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
        FormScores(steps_[j % 2], RoundUp(KeysOfStep(task, j), kFractal));
    }

    // Products of the anchor rows of the next blocks and the queries: (rows / 16, `anchor_rows` rounded to 16, 16).
    __aicore__ inline Accumulator MakeOffsets(const Task& task, uint32_t block, uint32_t anchor_rows)
    {
        const uint64_t row = static_cast<uint64_t>(task.kv_head) * 2 * t_.blocks + 2 * block;
        Tile anchors = anchor_tiles_.AllocTensor<half>();
        LoadPieces(anchors, anchors_[row * t_.dim], anchor_rows, t_.dim);
        anchor_tiles_.EnQue(anchors);
        anchors = anchor_tiles_.DeQue<half>();
        FormOffsets(anchors, anchor_rows);
        anchor_tiles_.FreeTensor(anchors);
        return offsets_.DeQue<float>();
    }

    __aicore__ inline void StoreWeights(const Task& task, uint32_t j, const Tile& weights)
    {
        CoreProducts::StoreWeights(KeysOfStep(task, j), weights);
    }

    // P V of step j, and P 1.
    __aicore__ inline void MakeProduct(const Task& task, uint32_t j)
    {
        FormProduct(steps_[j % 2][kBlockKeys * t_.dim], RoundUp(KeysOfStep(task, j), kFractal));
        step_tiles_.FreeTensor(steps_[j % 2]);
    }

private:
    __aicore__ inline uint32_t KeysOfStep(const Task& task, uint32_t j) const
    {
        return Least(kBlockKeys, task.keys - tasks_.Block(task, j) * kBlockKeys);
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
    AscendC::GlobalTensor<half> q_, keys_, v_, anchors_;
    AscendC::TQue<AscendC::TPosition::A1, 1> query_tiles_, anchor_tiles_, step_tiles_;
    Tile steps_[2];
};

}  // namespace pasa
