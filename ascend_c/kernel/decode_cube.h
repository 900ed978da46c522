// The cube core's part of decoding: S = Q K'^T in FP32, P V and P 1, one block of keys after the other.
#pragma once

#include "decode_task.h"
#include "multiply.h"

namespace pasa {

// Bytes that no row takes in the last column block of a tile in L1, which has room for 128 rows.
constexpr uint32_t kUnusedRows = (kTileRows - kDecodeRows) * kFractal * sizeof(half);
constexpr uint32_t kDecodeScores = kDecodeRows * kBlockKeys * sizeof(float);  // 32 KiB
constexpr uint32_t kDecodeOutput = kDecodeRows * kChunk * sizeof(float);      // 32 KiB: 128 columns
constexpr uint32_t kDecodeSums = kDecodeRows * kFractal * sizeof(float);
static_assert(2 * kDecodeScores + kDecodeOutput + kDecodeSums <= 128 * 1024, "they fit into L0C");

class DecodeCube {
public:
    __aicore__ inline DecodeCube(const DecodeArguments& arguments, const DecodeTiling& tiling, AscendC::TPipe& pipe)
        : t_(tiling),
          a_(tiling.attention),
          tasks_(tiling, arguments),
          multiplier_(pipe)
    {
        q_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.q));
        values_.Init(tiling, arguments.v, arguments.table, tiling.v);
        GM_ADDR at = arguments.workspace + AscendC::GetBlockIdx() * tiling.group_workspace.bytes;
        for (uint32_t i = 0; i < 2; ++i) {
            const DecodeWorkspace& w = tiling.group_workspace;
            keys_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + w.keys + i * w.keys_bytes));
            scores_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + w.scores + i * kDecodeScores));
            weights_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + w.weights + i * kDecodeScores / 2));
            product_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + w.product + i * w.product_bytes));
            sums_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + w.sums + i * kDecodeSums));
        }
        const uint32_t tile = kTileRows * a_.dim * sizeof(half);
        pipe.InitBuffer(query_tiles_, 1, tile - kUnusedRows);
        pipe.InitBuffer(key_tiles_, 2, tile);
        pipe.InitBuffer(value_tiles_, 3, tile);
        pipe.InitBuffer(weight_tiles_, 1, kTileRows * kBlockKeys * sizeof(half) - kUnusedRows);
        pipe.InitBuffer(score_parts_, 2, kDecodeScores);
        pipe.InitBuffer(outputs_, 1, kDecodeOutput);
        pipe.InitBuffer(sum_columns_, 1, kDecodeSums);
    }

    __aicore__ inline void Run()
    {
        Segment segment;
        tasks_.Begin(AscendC::GetBlockIdx());
        while (tasks_.Next(segment)) {
            if (segment.steps > 0) Attend(segment);
        }
    }

private:
    using Tile = AscendC::LocalTensor<half>;
    using Product = AscendC::LocalTensor<float>;

    __aicore__ inline void Attend(const Segment& s)
    {
        rows_ = s.item.tokens * t_.group;
        computed_ = Largest(rows_, 2);  // with one row Mmad would read its operand as a plain vector
        Tile queries = query_tiles_.AllocTensor<half>();
        LoadTile(queries, q_[s.item.token * t_.q_token + s.item.head * t_.q_head], rows_, a_.dim, a_.dim);
        query_tiles_.EnQue(queries);
        queries = query_tiles_.DeQue<half>();
        for (uint32_t j = 0; j < Least(s.steps, 2); ++j) LoadValues(s, j);
        MakeScores(s, 0, queries);
        for (uint32_t j = 0; j < s.steps; ++j) {
            if (j + 2 < s.steps) LoadValues(s, j + 2);
            if (j + 1 < s.steps) MakeScores(s, j + 1, queries);
            MakeProduct(s, j);
        }
        query_tiles_.FreeTensor(queries);
    }

    __aicore__ inline uint32_t KeysOf(const Segment& s, uint32_t j) const
    {
        return Least(kBlockKeys, s.item.keys - (s.block + j) * kBlockKeys);
    }

    // Values of a block, in pieces that lie within one page.
    __aicore__ inline void LoadValues(const Segment& s, uint32_t j)
    {
        const uint32_t first = (s.block + j) * kBlockKeys, total = KeysOf(s, j);
        Tile values = value_tiles_.AllocTensor<half>();
        for (uint32_t at = 0; at < total;) {
            uint32_t count = total - at;
            const AscendC::GlobalTensor<half> from = values_.At(s.item, first + at, count);
            LoadRows(values[at * kFractal], from, count, a_.dim, values_.RowStride(), total == 1);
            at += count;
        }
        value_tiles_.EnQue(values);
    }

    // S of a block, in FP32.
    __aicore__ inline void MakeScores(const Segment& s, uint32_t j, const Tile& queries)
    {
        const uint32_t slot = j % 2, count = KeysOf(s, j);
        AscendC::CrossCoreWaitFlag<kGroup>(kKeysReady + slot);
        Tile keys = key_tiles_.AllocTensor<half>();
        LoadTile(keys, keys_[slot], count, a_.dim, a_.dim);
        key_tiles_.EnQue(keys);
        keys = key_tiles_.DeQue<half>();
        Product c = score_parts_.AllocTensor<float>();
        for (uint32_t d = 0; d < a_.dim; d += kChunk) {
            const uint32_t column = d / kFractal * kColumnBlock;
            const Factors f{computed_, count, Least(kChunk, a_.dim - d), true, d > 0};
            multiplier_.Multiply(c, queries[column], keys[column], f);
        }
        key_tiles_.FreeTensor(keys);
        StoreRows(score_parts_, c, scores_[slot], count, kBlockKeys);
        AscendC::CrossCoreSetFlag<kGroup, PIPE_FIX>(kDecodeScoresReady + slot);
    }

    // P V and P 1 of a block.
    __aicore__ inline void MakeProduct(const Segment& s, uint32_t j)
    {
        const uint32_t slot = j % 2, count = KeysOf(s, j);
        Tile values = value_tiles_.DeQue<half>();
        AscendC::CrossCoreWaitFlag<kGroup>(kDecodeWeightsReady + slot);
        Tile weights = weight_tiles_.AllocTensor<half>();
        LoadTile(weights, weights_[slot], rows_, count, kBlockKeys);
        weight_tiles_.EnQue(weights);
        weights = weight_tiles_.DeQue<half>();
        Tile left = multiplier_.TakeLeft(weights, computed_, count);
        weight_tiles_.FreeTensor(weights);
        for (uint32_t d = 0; d < a_.dim; d += kChunk) {
            const Factors f{computed_, Least(kChunk, a_.dim - d), count, false, false};
            Tile right = multiplier_.TakeRight(values[d / kFractal * kColumnBlock], f);
            Product c = outputs_.AllocTensor<float>();
            multiplier_.Contract(c, left, right, f);
            multiplier_.FreeRight(right);
            StoreRows(outputs_, c, product_[slot][d], f.n, a_.dim);
        }
        value_tiles_.FreeTensor(values);
        Tile ones = multiplier_.TakeNumber(static_cast<half>(1.0f), count, kFractal);
        Product sum = sum_columns_.AllocTensor<float>();
        multiplier_.Contract(sum, left, ones, Factors{computed_, kFractal, count, false, false});
        multiplier_.FreeRight(ones);
        multiplier_.FreeLeft(left);
        StoreRows(sum_columns_, sum, sums_[slot], kFractal, kFractal);
        AscendC::CrossCoreSetFlag<kGroup, PIPE_FIX>(kDecodeProductReady + slot);
    }

    // A product's rows to GM, in FP32.
    template <typename Queue>
    __aicore__ inline void StoreRows(Queue& queue, Product& c, const AscendC::GlobalTensor<float>& to, uint32_t columns,
                                     uint32_t stride)
    {
        queue.EnQue(c);
        c = queue.template DeQue<float>();
        Store(to, c, rows_, columns, stride, computed_);
        queue.FreeTensor(c);
    }

    const DecodeTiling& t_;
    const AttentionTiling& a_;
    DecodeTasks tasks_;
    Multiplier multiplier_;
    Cache values_;
    uint32_t rows_ = 0, computed_ = 0;  // of the tile
    AscendC::GlobalTensor<half> q_, keys_[2], weights_[2];
    AscendC::GlobalTensor<float> scores_[2], product_[2], sums_[2];
    // Together seven buffers: each takes an event of MTE1_MTE2 while it is free, and there are eight.
    AscendC::TQue<AscendC::TPosition::A1, 1> query_tiles_, weight_tiles_;
    AscendC::TQue<AscendC::TPosition::A1, 2> key_tiles_;
    AscendC::TQue<AscendC::TPosition::A1, 3> value_tiles_;
    AscendC::TQue<AscendC::TPosition::CO1, 1> score_parts_, outputs_, sum_columns_;
};

}  // namespace pasa
