// The cube core's part of attention: S' = Q K'^T - rho, P V, and the block offsets.
#pragma once

#include "arguments.h"
#include "flags.h"
#include "multiply.h"
#include "task.h"

namespace pasa {

template <bool kExact>
class CubeSide {
public:
    __aicore__ inline CubeSide(const Arguments& arguments, const AttentionTiling& tiling, AscendC::TPipe& pipe)
        : t_(tiling),
          tasks_(tiling, arguments.lengths),
          multiplier_(pipe)
    {
        q_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.q));
        keys_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.keys));
        v_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.v));
        if (kExact) anchors_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.anchors));
        if (tiling.keep_scores) kept_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.scores));
        const uint64_t group = static_cast<uint64_t>(AscendC::GetBlockIdx()) * kLanes;
        for (uint32_t i = 0; i < kLanes; ++i) {
            GM_ADDR at = arguments.workspace + (group + i) * tiling.lane.bytes;
            scores_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + tiling.lane.scores));
            wide_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + tiling.lane.wide));
            weights_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + tiling.lane.weights));
            product_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + tiling.lane.product));
            reference_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + tiling.lane.reference));
            verdict_[i].SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(at + tiling.lane.verdict));
            offsets_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + tiling.lane.offsets));
        }
        pipe.InitBuffer(query_tiles_, 1, tiling.lanes * kTileRows * tiling.dim * sizeof(half));
        pipe.InitBuffer(key_tiles_, 2, kBlockKeys * tiling.dim * sizeof(half));
        pipe.InitBuffer(value_tiles_, 2, kBlockKeys * tiling.dim * sizeof(half));
        pipe.InitBuffer(weight_tiles_, 2, kTileRows * kBlockKeys * sizeof(half));
        if (kExact) pipe.InitBuffer(references_, 1, kTileRows * kFractal * sizeof(half));
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
        for (uint32_t i = 0; kExact && i < kLanes; ++i) {
            if (task.lane[i].steps > 0) MakeOffsets(task, i, queries[i * kTileRows * t_.dim]);
        }
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
                if (kExact) Answer(task, i, j);
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

    // Of K': as published, the last block is whole.
    __aicore__ inline uint32_t ShiftedKeysOf(const Task& task, uint32_t j) const
    {
        return kExact ? KeysOf(task, j) : kBlockKeys;
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
        const uint64_t row = kExact ? KeyRow(task, j) : blocks * kBlockKeys;
        LoadTile(keys, keys_[row * t_.dim], ShiftedKeysOf(task, j), t_.dim, t_.dim);
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

    // anchors Q^T in FP32, 128 anchor rows at a time; one row of the result for each, one column for each query.
    __aicore__ inline void MakeOffsets(const Task& task, uint32_t i, const Tile& queries)
    {
        const uint32_t total = 2 * task.lane[i].steps;
        for (uint32_t first = 0; first < total; first += kTileRows) {
            const uint32_t rows = Least(kTileRows, total - first);
            Tile anchors = key_tiles_.AllocTensor<half>();
            const uint64_t row = static_cast<uint64_t>(task.kv_head) * 2 * t_.blocks + first;
            LoadTile(anchors, anchors_[row * t_.dim], rows, t_.dim, t_.dim);
            key_tiles_.EnQue(anchors);
            anchors = key_tiles_.DeQue<half>();
            AscendC::LocalTensor<float> c = accumulators_.AllocTensor<float>();
            Contract(c, anchors, queries, rows, task.lane[i].Computed());
            key_tiles_.FreeTensor(anchors);
            c = Finished(c);
            Store(offsets_[i][first * kTileRows], c, rows, task.lane[i].Computed(), kTileRows);
            accumulators_.FreeTensor(c);
        }
        AscendC::CrossCoreSetFlag<kGroup, PIPE_FIX>(kProductReady + i);
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

    // S' = Q K'^T - rho: the reference is one more fractal of Q, and that of K' is a constant.
    __aicore__ inline void MakeScores(const Task& task, uint32_t i, uint32_t j, const Tile& queries, const Tile& keys)
    {
        const LaneTask& lane = task.lane[i];
        const uint32_t count = ShiftedKeysOf(task, j);
        AscendC::LocalTensor<float> c = accumulators_.AllocTensor<float>();
        Contract(c, queries, keys, lane.Computed(), count);
        if (kExact) {
            if (j == 0) AscendC::CrossCoreWaitFlag<kGroup>(kWeightsReady + i);
            Tile reference = references_.AllocTensor<half>();
            AscendC::DataCopy(reference, reference_[i], lane.Computed() * kFractal);
            references_.EnQue(reference);
            reference = references_.DeQue<half>();
            multiplier_.AddMultiple(c, reference, static_cast<half>(kReferenceWeight), lane.Computed(), count);
            references_.FreeTensor(reference);
        }
        c = Finished(c);
        Store(scores_[i], c, lane.Computed(), count, kBlockKeys);
        AscendC::CrossCoreSetFlag<kGroup, PIPE_FIX>(kScoresReady + i);
        if (t_.keep_scores) {
            const uint64_t tile = (static_cast<uint64_t>(task.head) * DivideUp(t_.rows, kTileRows) +
                                   lane.first_row / kTileRows) * t_.blocks + j;
            Store(kept_[tile * kTileRows * kBlockKeys], c, lane.rows, count, kBlockKeys);
        }
        if (kExact) {
            accumulator_[i] = c;
        } else {
            accumulators_.FreeTensor(c);
        }
    }

    // The same tile again in FP32, the half of each vector core that asks for it.
    __aicore__ inline void Answer(const Task& task, uint32_t i, uint32_t j)
    {
        AscendC::CrossCoreWaitFlag<kGroup>(kVerdictReady + i);
        AscendC::DataCacheCleanAndInvalid<int32_t, AscendC::CacheLine::SINGLE_CACHE_LINE,
                                          AscendC::DcciDst::CACHELINE_OUT>(verdict_[i]);
        const uint32_t rows = task.lane[i].Computed();
        for (uint32_t first = 0; first < rows; first += kHalfRows) {
            if (verdict_[i].GetValue(first / kHalfRows * kVerdictWords) == 0) continue;
            Store(wide_[i][first * kBlockKeys], accumulator_[i][first * kFractal], Least(kHalfRows, rows - first),
                  KeysOf(task, j), kBlockKeys, rows);
        }
        AscendC::CrossCoreSetFlag<kGroup, PIPE_FIX>(kWideReady + i);
        accumulators_.FreeTensor(accumulator_[i]);
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
    AscendC::GlobalTensor<half> q_, keys_, v_, anchors_, kept_;
    AscendC::GlobalTensor<half> scores_[kLanes], weights_[kLanes], reference_[kLanes];
    AscendC::GlobalTensor<float> wide_[kLanes], product_[kLanes], offsets_[kLanes];
    AscendC::GlobalTensor<int32_t> verdict_[kLanes];
    // Together eight buffers: each takes an event of MTE1_MTE2 while it is free, and there are eight.
    AscendC::TQue<AscendC::TPosition::A1, 1> query_tiles_;
    AscendC::TQue<AscendC::TPosition::A1, 2> key_tiles_;
    AscendC::TQue<AscendC::TPosition::B1, 2> value_tiles_;
    AscendC::TQue<AscendC::TPosition::A1, 1> weight_tiles_;
    AscendC::TQue<AscendC::TPosition::A1, 1> references_;
    AscendC::TQue<AscendC::TPosition::CO1, 1> accumulators_;
    AscendC::LocalTensor<float> accumulator_[kLanes];  // exact: kept until the verdict
};

}  // namespace pasa
