// The cube core's part of attention by the exact recovery: S' = Q K'^T - rho, P V and P 1, and the block offsets.
#pragma once

#include "arguments.h"
#include "flags.h"
#include "multiply.h"
#include "task.h"

namespace pasa {

// Keys of a part of a score tile: two parts in FP32 fit into L0C beside the output and the row sums.
constexpr uint32_t kPartKeys = 48;
constexpr uint32_t kPart = kTileRows * kPartKeys * sizeof(float);      // 24 KiB
constexpr uint32_t kHalfOutput = kHalfRows * kChunk * sizeof(float);   // 32 KiB: 64 rows and 128 columns
constexpr uint32_t kHalfSums = kHalfRows * kFractal * sizeof(float);   // 4 KiB
static_assert(2 * (kPart + kHalfOutput + kHalfSums) <= 128 * 1024, "they fit into L0C");

// One query tile at a time, and the key blocks that it visits, one step each. The scores of step j + 1 are formed
// before the weights of step j are waited for.
class ExactCube {
public:
    __aicore__ inline ExactCube(const Arguments& arguments, const AttentionTiling& tiling, AscendC::TPipe& pipe)
        : t_(tiling),
          tasks_(tiling, arguments.lengths, arguments.visits, arguments.starts),
          multiplier_(pipe)
    {
        q_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.q));
        keys_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.keys));
        v_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.v));
        anchors_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.anchors));
        if (tiling.keep_scores) kept_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.scores));
        const uint64_t group = static_cast<uint64_t>(AscendC::GetBlockIdx()) * kLanes;
        for (uint32_t i = 0; i < kLanes; ++i) {
            GM_ADDR at = arguments.workspace + (group + i) * tiling.lane.bytes;
            scores_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + tiling.lane.scores));
            wide_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + tiling.lane.wide));
            weights_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + tiling.lane.weights));
            product_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + tiling.lane.product));
            sums_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + tiling.lane.sums));
            reference_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + tiling.lane.reference));
            verdict_[i].SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(at + tiling.lane.verdict));
            if (i == 0) offsets_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + tiling.lane.offsets));
        }
        pipe.InitBuffer(query_tiles_, 1, kTileRows * tiling.dim * sizeof(half));
        pipe.InitBuffer(step_tiles_, 3, 2 * kBlockKeys * tiling.dim * sizeof(half));
        pipe.InitBuffer(weight_tiles_, 1, kTileRows * kBlockKeys * sizeof(half));
        pipe.InitBuffer(references_, 2, kTileRows * kFractal * sizeof(half));
        pipe.InitBuffer(parts_, 2, kPart);
        pipe.InitBuffer(outputs_, 2, kHalfOutput);
        pipe.InitBuffer(sum_columns_, 2, kHalfSums);
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
    using Product = AscendC::LocalTensor<float>;

    __aicore__ inline void Attend(const Task& task)
    {
        rows_ = task.lane[0].Twinned();
        queries_ = LoadQueries(task);
        MakeOffsets(task);
        LoadStep(task, 0);
        steps_[0] = step_tiles_.DeQue<half>();
        if (task.steps > 1) LoadStep(task, 1);
        AscendC::CrossCoreWaitFlag<kGroup>(kWeightsReady + 1);  // the first two references
        MakeScores(task, 0);
        for (uint32_t j = 0; j < task.steps; ++j) {
            if (j + 1 < task.steps) {
                steps_[(j + 1) % 2] = step_tiles_.DeQue<half>();
                if (j + 2 < task.steps) LoadStep(task, j + 2);
                MakeScores(task, j + 1);
            }
            Answer(task, j);
            MakeProduct(task, j);
            step_tiles_.FreeTensor(steps_[j % 2]);
        }
        if (t_.resident) {
            for (uint32_t half = 0; half < 2; ++half) Flush(half, (task.steps - 1) % 2);
            AscendC::CrossCoreSetFlag<kGroup, PIPE_FIX>(kProductReady + (task.steps - 1) % 2);
        }
        for (uint32_t slot = 0; slot < Least(task.steps, 2); ++slot) references_.FreeTensor(held_[slot]);
        query_tiles_.FreeTensor(queries_);
    }

    // Keys of the block of step j.
    __aicore__ inline uint32_t KeysOf(const Task& task, uint32_t j) const
    {
        return Least(kBlockKeys, task.keys - tasks_.Block(task, j) * kBlockKeys);
    }

    // Rows of one half of the tile.
    __aicore__ inline uint32_t RowsOf(uint32_t half) const
    {
        return rows_ <= half * kHalfRows ? 0 : Least(kHalfRows, rows_ - half * kHalfRows);
    }

    __aicore__ inline Tile LoadQueries(const Task& task)
    {
        const LaneTask& lane = task.lane[0];
        const AscendC::GlobalTensor<half> from = q_[(task.query_row + lane.first_row) * t_.dim];
        const uint32_t single = lane.rows - 1;  // the row that is loaded twice, if there is one more than rows
        Tile tile = query_tiles_.AllocTensor<half>();
        LoadTile(tile, from, rows_ > lane.rows && single > 0 ? single : lane.rows, t_.dim, t_.dim);
        if (rows_ > lane.rows && single > 0) {
            LoadTile(tile[single * kFractal], from[single * t_.dim], 1, t_.dim, t_.dim);
        }
        query_tiles_.EnQue(tile);
        return query_tiles_.DeQue<half>();
    }

    // Keys of the block of step j, and behind them its values.
    __aicore__ inline void LoadStep(const Task& task, uint32_t j)
    {
        const uint64_t row = task.key_row + tasks_.Block(task, j) * kBlockKeys;
        const uint32_t count = KeysOf(task, j);
        Tile step = step_tiles_.AllocTensor<half>();
        LoadTile(step, keys_[row * t_.dim], count, t_.dim, t_.dim);
        LoadTile(step[kBlockKeys * t_.dim], v_[row * t_.dim], count, t_.dim, t_.dim);
        step_tiles_.EnQue(step);
    }

    // anchors Q^T in FP32, 64 anchor rows at a time; one row of the result for each, one column for each query.
    __aicore__ inline void MakeOffsets(const Task& task)
    {
        const uint32_t total = t_.anchor_rows * task.span;
        for (uint32_t first = 0; first < total; first += kHalfRows) {
            const uint32_t rows = Least(kHalfRows, total - first);
            Tile anchors = step_tiles_.AllocTensor<half>();
            const uint64_t row = (task.key_block + task.first) * t_.anchor_rows + first;
            LoadTile(anchors, anchors_[row * t_.dim], rows, t_.dim, t_.dim);
            step_tiles_.EnQue(anchors);
            anchors = step_tiles_.DeQue<half>();
            Product c = outputs_.AllocTensor<float>();
            for (uint32_t d = 0; d < t_.dim; d += kChunk) {
                const Factors f{rows, rows_, Least(kChunk, t_.dim - d), true, d > 0};
                const uint32_t column = d / kFractal * kColumnBlock;
                multiplier_.Multiply(c, anchors[column], queries_[column], f);
            }
            step_tiles_.FreeTensor(anchors);
            c = Finished(outputs_, c);
            Store(offsets_[first * kTileRows], c, rows, rows_, kTileRows);
            outputs_.FreeTensor(c);
        }
        AscendC::CrossCoreSetFlag<kGroup, PIPE_FIX>(kProductReady);
    }

    template <typename Queue>
    __aicore__ inline Product Finished(Queue& queue, Product& c)
    {
        queue.EnQue(c);
        return queue.template DeQue<float>();
    }

    // S' of step j as FP16. Its reference stays until there is another one for a step with an even, or odd, number.
    __aicore__ inline void MakeScores(const Task& task, uint32_t j)
    {
        const uint32_t slot = j % 2;
        if (j < 2 || brought_[slot]) {
            if (j > 1) references_.FreeTensor(held_[slot]);
            Tile reference = references_.AllocTensor<half>();
            AscendC::DataCopy(reference, reference_[slot], rows_ * kFractal);
            references_.EnQue(reference);
            held_[slot] = references_.DeQue<half>();
        }
        wanted_[0] = wanted_[1] = 0;
        FormTile(task, j);
        AscendC::CrossCoreSetFlag<kGroup, PIPE_FIX>(kScoresReady + slot);
    }

    // Q K'^T - rho in parts of 48 keys: the reference is one more fractal of Q, and that of K' is a constant.
    __aicore__ inline void FormTile(const Task& task, uint32_t j)
    {
        const uint32_t total = KeysOf(task, j);
        const bool whole = t_.dim <= kChunk;  // then Q is loaded into L0A once for all parts
        Tile left;
        for (uint32_t first = 0; first < total; first += kPartKeys) {
            const uint32_t count = Least(kPartKeys, total - first);
            Product c = parts_.AllocTensor<float>();
            for (uint32_t d = 0; d < t_.dim; d += kChunk) {
                const Factors f{rows_, count, Least(kChunk, t_.dim - d), true, d > 0};
                const uint32_t column = d / kFractal * kColumnBlock;
                if (!whole || first == 0) left = multiplier_.TakeLeft(queries_[column], rows_, f.k);
                Tile right = multiplier_.TakeRight(steps_[j % 2][column + first * kFractal], f);
                multiplier_.Contract(c, left, right, f);
                multiplier_.FreeRight(right);
                if (!whole || first + count == total) multiplier_.FreeLeft(left);
            }
            SubtractReference(c, held_[j % 2], count);
            c = Finished(parts_, c);
            StorePart(task, j, c, first, count);
            parts_.FreeTensor(c);
        }
    }

    // A part of a tile as FP16, or in FP32 the halves of its rows that are wanted so.
    __aicore__ inline void StorePart(const Task& task, uint32_t j, const Product& c, uint32_t first, uint32_t count)
    {
        const uint32_t slot = j % 2;
        if (((wanted_[0] | wanted_[1]) & kWantsWide) == 0) {
            Store(scores_[slot][first], c, rows_, count, kBlockKeys);
            if (!t_.keep_scores) return;
            const uint64_t place = task.tile * t_.blocks + tasks_.Block(task, j);
            Store(kept_[place * kTileRows * kBlockKeys + first], c, task.lane[0].rows, count, kBlockKeys, rows_);
            return;
        }
        for (uint32_t half = 0; half < 2; ++half) {
            if ((wanted_[half] & kWantsWide) == 0) continue;
            Store(wide_[slot][half * kHalfRows * kBlockKeys + first], c[half * kHalfRows * kFractal], RowsOf(half),
                  count, kBlockKeys, rows_);
        }
    }

    __aicore__ inline void SubtractReference(const Product& c, const Tile& reference, uint32_t count)
    {
        multiplier_.AddMultiple(c, reference, static_cast<half>(kReferenceWeight), rows_, count);
    }

    // What the vector cores ask for after they have seen the tile: each the same tile in FP32, or its output so far.
    __aicore__ inline void Answer(const Task& task, uint32_t j)
    {
        const uint32_t slot = j % 2;
        AscendC::CrossCoreWaitFlag<kGroup>(kVerdictReady + slot);
        AscendC::DataCacheCleanAndInvalid<int32_t, AscendC::CacheLine::SINGLE_CACHE_LINE,
                                          AscendC::DcciDst::CACHELINE_OUT>(verdict_[slot]);
        for (uint32_t half = 0; half < 2; ++half) wanted_[half] = verdict_[slot].GetValue(half * kVerdictWords);
        brought_[slot] = ((wanted_[0] | wanted_[1]) & kBringsReference) != 0;
        if (((wanted_[0] | wanted_[1]) & kWantsWide) != 0) FormTile(task, j);
        for (uint32_t half = 0; half < 2; ++half) {
            if ((wanted_[half] & kWantsOutput) != 0) Flush(half, 1 - slot);
        }
        AscendC::CrossCoreSetFlag<kGroup, PIPE_FIX>(kWideReady + slot);
    }

    // The products of one half of the rows since its last flush, to GM.
    __aicore__ inline void Flush(uint32_t half, uint32_t slot)
    {
        if (RowsOf(half) == 0) return;
        const uint64_t row = half * kHalfRows;
        Product out = Finished(outputs_, output_[half]), sum = Finished(sum_columns_, sum_[half]);
        Store(product_[slot][row * t_.dim], out, RowsOf(half), t_.dim, t_.dim);
        Store(sums_[slot][row * kFractal], sum, RowsOf(half), kFractal, kFractal);
        outputs_.FreeTensor(out);
        sum_columns_.FreeTensor(sum);
        running_[half] = false;
    }

    // P V, and with a column of ones beside V the sums of the rows of P; up to D = 128 onto what L0C holds.
    __aicore__ inline void MakeProduct(const Task& task, uint32_t j)
    {
        const uint32_t slot = j % 2, count = KeysOf(task, j);
        AscendC::CrossCoreWaitFlag<kGroup>(kWeightsReady + slot);
        Tile weights = weight_tiles_.AllocTensor<half>();
        LoadTile(weights, weights_[slot], rows_, count, kBlockKeys);
        weight_tiles_.EnQue(weights);
        weights = weight_tiles_.DeQue<half>();
        Tile left = multiplier_.TakeLeft(weights, rows_, count);
        weight_tiles_.FreeTensor(weights);
        for (uint32_t d = 0; d < t_.dim; d += kChunk) {
            const Factors f{kHalfRows, Least(kChunk, t_.dim - d), count, false, false};
            const Tile values = steps_[slot][kBlockKeys * t_.dim + d / kFractal * kColumnBlock];
            Tile right = multiplier_.TakeRight(values, f);
            for (uint32_t half = 0; half < 2; ++half) AddProduct(outputs_, output_[half], half, left, right, f);
            multiplier_.FreeRight(right);
            for (uint32_t half = 0; half < 2 && !t_.resident; ++half) {
                if (RowsOf(half) == 0) continue;
                Product out = Finished(outputs_, output_[half]);
                Store(product_[slot][half * kHalfRows * t_.dim + d], out, RowsOf(half), f.n, t_.dim);
                outputs_.FreeTensor(out);
            }
        }
        const Factors ones{kHalfRows, kFractal, count, false, false};
        Tile right = multiplier_.TakeNumber(static_cast<half>(1.0f), count, kFractal);
        for (uint32_t half = 0; half < 2; ++half) AddProduct(sum_columns_, sum_[half], half, left, right, ones);
        multiplier_.FreeRight(right);
        multiplier_.FreeLeft(left);
        for (uint32_t half = 0; half < 2; ++half) running_[half] = t_.resident && RowsOf(half) > 0;
        if (t_.resident) return;
        for (uint32_t half = 0; half < 2; ++half) {
            if (RowsOf(half) == 0) continue;
            Product sum = Finished(sum_columns_, sum_[half]);
            Store(sums_[slot][half * kHalfRows * kFractal], sum, RowsOf(half), kFractal, kFractal);
            sum_columns_.FreeTensor(sum);
        }
        AscendC::CrossCoreSetFlag<kGroup, PIPE_FIX>(kProductReady + slot);
    }

    // Rows of one half of P times a right operand, onto a running sum, or into an accumulator of its own.
    template <typename Queue>
    __aicore__ inline void AddProduct(Queue& queue, Product& sum, uint32_t half, const Tile& left, const Tile& right,
                                      Factors f)
    {
        f.m = RowsOf(half);
        f.adds = running_[half];
        if (f.m == 0) return;
        if (!f.adds) sum = queue.template AllocTensor<float>();
        multiplier_.Contract(sum, Multiplier::RowsFrom(left, half * kHalfRows, f.k), right, f);
    }

    const AttentionTiling& t_;
    Tasks tasks_;
    Multiplier multiplier_;
    uint32_t rows_ = 0;                        // of the tile, as computed
    int32_t wanted_[2] = {0, 0};               // by each vector core, of the tile that is formed
    bool brought_[2] = {false, false};         // a vector core has a new reference for the second block from there
    bool running_[2] = {false, false};         // L0C holds products of that half of the rows
    Tile queries_, steps_[2], held_[2];        // of the task; keys and values, and references, of two blocks
    Product output_[2], sum_[2];               // of each half of the rows
    AscendC::GlobalTensor<half> q_, keys_, v_, anchors_, kept_;
    AscendC::GlobalTensor<half> scores_[kLanes], weights_[kLanes], reference_[kLanes];
    AscendC::GlobalTensor<float> wide_[kLanes], product_[kLanes], sums_[kLanes], offsets_;
    AscendC::GlobalTensor<int32_t> verdict_[kLanes];
    // Together seven buffers: each takes an event of MTE1_MTE2 while it is free, and there are eight.
    AscendC::TQue<AscendC::TPosition::A1, 1> query_tiles_;
    AscendC::TQue<AscendC::TPosition::A1, 2> step_tiles_;
    AscendC::TQue<AscendC::TPosition::A1, 1> weight_tiles_;
    AscendC::TQue<AscendC::TPosition::A1, 1> references_;
    AscendC::TQue<AscendC::TPosition::CO1, 1> parts_;
    AscendC::TQue<AscendC::TPosition::CO1, 1> outputs_;
    AscendC::TQue<AscendC::TPosition::CO1, 1> sum_columns_;
};

}  // namespace pasa
