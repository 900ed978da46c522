// The cube core's part of attention by the published recovery: S' = Q K'^T and P V.
#pragma once

#include "arguments.h"
#include "flags.h"
#include "multiply.h"
#include "task.h"

namespace pasa {

class PaperCube {
public:
    __aicore__ inline PaperCube(const Arguments& arguments, const AttentionTiling& tiling, AscendC::TPipe& pipe)
        : t_(tiling),
          tasks_(tiling, arguments.lengths),
          multiplier_(pipe)
    {
        q_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.q));
        keys_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.keys));
        v_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.v));
        if (tiling.keep_scores) kept_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.scores));
        const uint64_t group = static_cast<uint64_t>(AscendC::GetBlockIdx()) * kLanes;
        for (uint32_t i = 0; i < kLanes; ++i) {
            GM_ADDR at = arguments.workspace + (group + i) * tiling.lane.bytes;
            scores_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + tiling.lane.scores));
            weights_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + tiling.lane.weights));
            product_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + tiling.lane.product));
        }
        pipe.InitBuffer(query_tiles_, 1, tiling.lanes * kTileRows * tiling.dim * sizeof(half));
        pipe.InitBuffer(key_tiles_, 2, kBlockKeys * tiling.dim * sizeof(half));
        pipe.InitBuffer(value_tiles_, 2, kBlockKeys * tiling.dim * sizeof(half));
        pipe.InitBuffer(weight_tiles_, 2, kTileRows * kBlockKeys * sizeof(half));
        pipe.InitBuffer(accumulators_, 2, kAccumulator);
    }

    __aicore__ inline void Run()
    {
        Task task;
        for (uint32_t turn = 0; tasks_.Get(turn, AscendC::GetBlockIdx(), AscendC::GetBlockNum(), task); ++turn) {
            if (task.steps > 0) Attend(task);
        }
    }

private:
    using Tile = AscendC::LocalTensor<half>;

    __aicore__ inline void Attend(const Task& task)
    {
        Tile queries = LoadQueries(task);
        LoadKeys(task, 0);
        LoadStep(task, 0);
        Tile keys = key_tiles_.DeQue<half>();
        for (uint32_t i = 0; i < kLanes; ++i) {
            if (task.lane[i].steps > 0) MakeScores(task, i, 0, queries[i * kTileRows * t_.dim], keys);
        }
        key_tiles_.FreeTensor(keys);
        for (uint32_t j = 0; j < task.steps; ++j) {
            const bool more = j + 1 < task.steps;
            if (more) LoadStep(task, j + 1);
            Tile values = value_tiles_.DeQue<half>();
            if (more) keys = key_tiles_.DeQue<half>();
            for (uint32_t i = 0; i < kLanes; ++i) {  // a lane's next scores do not wait for the other lane's weights
                if (j >= task.lane[i].steps) continue;
                MakeProduct(task, i, j, values);
                if (j + 1 < task.lane[i].steps) MakeScores(task, i, j + 1, queries[i * kTileRows * t_.dim], keys);
            }
            value_tiles_.FreeTensor(values);
            if (more) key_tiles_.FreeTensor(keys);
        }
        query_tiles_.FreeTensor(queries);
    }

    __aicore__ inline uint32_t KeysOf(const Task& task, uint32_t j) const
    {
        return Least(kBlockKeys, task.keys - j * kBlockKeys);
    }

    // Both lanes' tiles, one behind the other.
    __aicore__ inline Tile LoadQueries(const Task& task)
    {
        Tile tiles = query_tiles_.AllocTensor<half>();
        for (uint32_t i = 0; i < kLanes; ++i) {
            if (task.lane[i].steps == 0) continue;
            const uint64_t row = static_cast<uint64_t>(task.head) * t_.rows + task.lane[i].first_row;
            LoadTile(tiles[i * kTileRows * t_.dim], q_[row * t_.dim], task.lane[i].rows, t_.dim, t_.dim);
        }
        query_tiles_.EnQue(tiles);
        return query_tiles_.DeQue<half>();
    }

    __aicore__ inline void LoadKeys(const Task& task, uint32_t j)
    {
        Tile keys = key_tiles_.AllocTensor<half>();
        const uint64_t blocks = static_cast<uint64_t>(task.kv_head) * t_.blocks + j;
        LoadTile(keys, keys_[blocks * kBlockKeys * t_.dim], kBlockKeys, t_.dim, t_.dim);  // the last one is whole, too
        key_tiles_.EnQue(keys);
    }

    // Values of block j, and the keys whose scores follow.
    __aicore__ inline void LoadStep(const Task& task, uint32_t j)
    {
        Tile values = value_tiles_.AllocTensor<half>();
        LoadTile(values, v_[KeyRow(task, j) * t_.dim], KeysOf(task, j), t_.dim, t_.dim);
        value_tiles_.EnQue(values);
        if (j + 1 < task.steps) LoadKeys(task, j + 1);
    }

    __aicore__ inline uint64_t KeyRow(const Task& task, uint32_t j) const
    {
        return static_cast<uint64_t>(task.kv_head) * t_.keys + j * kBlockKeys;
    }

    // C (m, n) = A B^T over the head dimension.
    __aicore__ inline void Contract(const AscendC::LocalTensor<float>& c, const Tile& a, const Tile& b, uint32_t m,
                                    uint32_t n)
    {
        for (uint32_t d = 0; d < t_.dim; d += kChunk) {
            const Factors f{m, n, Least(kChunk, t_.dim - d), true, d > 0};
            multiplier_.Multiply(c, a[d / kFractal * kColumnBlock], b[d / kFractal * kColumnBlock], f);
        }
    }

    __aicore__ inline AscendC::LocalTensor<float> Finished(AscendC::LocalTensor<float>& c)
    {
        accumulators_.EnQue(c);
        return accumulators_.DeQue<float>();
    }

    __aicore__ inline void MakeScores(const Task& task, uint32_t i, uint32_t j, const Tile& queries, const Tile& keys)
    {
        const LaneTask& lane = task.lane[i];
        AscendC::LocalTensor<float> c = accumulators_.AllocTensor<float>();
        Contract(c, queries, keys, lane.Computed(), kBlockKeys);
        c = Finished(c);
        Store(scores_[i], c, lane.Computed(), kBlockKeys, kBlockKeys);
        AscendC::CrossCoreSetFlag<kGroup, PIPE_FIX>(kScoresReady + i);
        if (t_.keep_scores) {
            const uint64_t tile = (static_cast<uint64_t>(task.head) * DivideUp(t_.rows, kTileRows) +
                                   lane.first_row / kTileRows) * t_.blocks + j;
            Store(kept_[tile * kTileRows * kBlockKeys], c, lane.rows, kBlockKeys, kBlockKeys);
        }
        accumulators_.FreeTensor(c);
    }

    __aicore__ inline void MakeProduct(const Task& task, uint32_t i, uint32_t j, const Tile& values)
    {
        const LaneTask& lane = task.lane[i];
        const uint32_t count = KeysOf(task, j);
        AscendC::CrossCoreWaitFlag<kGroup>(kWeightsReady + i);
        Tile weights = weight_tiles_.AllocTensor<half>();
        LoadTile(weights, weights_[i], lane.Computed(), count, kBlockKeys);
        weight_tiles_.EnQue(weights);
        weights = weight_tiles_.DeQue<half>();
        for (uint32_t d = 0; d < t_.dim; d += kChunk) {
            const uint32_t columns = Least(kChunk, t_.dim - d);
            AscendC::LocalTensor<float> c = accumulators_.AllocTensor<float>();
            const Factors f{lane.Computed(), columns, count, false, false};
            multiplier_.Multiply(c, weights, values[d / kFractal * kColumnBlock], f);
            c = Finished(c);
            Store(product_[i][d], c, lane.Computed(), columns, t_.dim);
            accumulators_.FreeTensor(c);
        }
        weight_tiles_.FreeTensor(weights);
        AscendC::CrossCoreSetFlag<kGroup, PIPE_FIX>(kProductReady + i);
    }

    const AttentionTiling& t_;
    Tasks tasks_;
    Multiplier multiplier_;
    AscendC::GlobalTensor<half> q_, keys_, v_, kept_;
    AscendC::GlobalTensor<half> scores_[kLanes], weights_[kLanes];
    AscendC::GlobalTensor<float> product_[kLanes];
    AscendC::TQue<AscendC::TPosition::A1, 1> query_tiles_;
    AscendC::TQue<AscendC::TPosition::A1, 2> key_tiles_;
    AscendC::TQue<AscendC::TPosition::B1, 2> value_tiles_;
    AscendC::TQue<AscendC::TPosition::A1, 1> weight_tiles_;
    AscendC::TQue<AscendC::TPosition::CO1, 1> accumulators_;
};

}  // namespace pasa
