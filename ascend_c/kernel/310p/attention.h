// Attention by the exact recovery on a core of an Ascend 310P, which has a cube unit and a vector unit. Scores are FP32
// and never leave the core.
#pragma once

#include "fractals.h"
#include "products.h"

namespace pasa {

// A score that a row does not see, in nats: below every other, which is above -2^123, and above kNothing.
constexpr float kHiddenNats = -0x1p124f;
// 11 ln 2: weights are exp(score - reference), and the reference is this much below the row's largest score. FP32 rounds
// that distance to its grid, a power of two: to 8 where the grid is 1, 2, 4 or 8 nats, and to 0 where it is coarser. So a
// weight is at most e^8 = 2981 at any score, and FP16 rounds one to zero only 24.9 nats below the largest.
constexpr float kBelowLargest = 7.624618986f;

// One query tile of 64 rows at a time. While the vector unit makes the weights of block j, the cube unit forms the scores
// of block j + 1; P V of block j is added to the output after the softmax of block j + 1.
class CoreAttention {
public:
    __aicore__ inline CoreAttention(const Arguments& arguments, const AttentionTiling& tiling, AscendC::TPipe& pipe)
        : t_(tiling),
          tasks_(tiling, arguments.lengths),
          products_(arguments, tiling, pipe)
    {
        units_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.units));
        out_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.out));
        lse_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.lse));
        pipe.InitBuffer(tile_buffer_, kHalfRows * kBlockKeys * sizeof(float));
        pipe.InitBuffer(work_buffer_, FractalTile::kWork * sizeof(float));
        pipe.InitBuffer(output_buffer_, kHalfRows * tiling.dim * sizeof(float));
        pipe.InitBuffer(offset_buffer_, kAnchorRows * kHalfRows * sizeof(float));
        pipe.InitBuffer(spread_buffer_, kHalfRows * kFractal * sizeof(float));
        pipe.InitBuffer(sums_buffer_, kHalfRows * kFractal * sizeof(float));
        pipe.InitBuffer(rows_buffer_, kRows * kHalfRows * sizeof(float));
        pipe.InitBuffer(weights_out_, 1, kHalfRows * kBlockKeys * sizeof(half));
        pipe.InitBuffer(tile_out_, 1, kHalfRows * tiling.dim * sizeof(half));
        pipe.InitBuffer(row_out_, 1, kHalfRows * sizeof(float));
        tile_ = tile_buffer_.Get<float>();
        work_ = work_buffer_.Get<float>();
        output_ = output_buffer_.Get<float>();
        offsets_ = offset_buffer_.Get<float>();
        spread_ = spread_buffer_.Get<float>();
        sums_ = sums_buffer_.Get<float>();
        values_ = rows_buffer_.Get<float>();
    }

    __aicore__ inline void Run()
    {
        Task task;
        for (uint32_t turn = 0; tasks_.Get(turn, AscendC::GetBlockIdx(), AscendC::GetBlockNum(), task); ++turn) {
            Attend(task);
        }
        products_.Close();
    }

private:
    using Row = RowMath::Row;
    using FloatTile = AscendC::LocalTensor<float>;
    using HalfTile = AscendC::LocalTensor<half>;

    // Numbers of rows. These are nats: kReference, what the weights are relative to; kFrame and kFramed, q.f of the blocks
    // so far and of this one; kOffset, its q.(a - f); kGap, the reference as seen from its scores.
    enum RowNumber { kReference, kSum, kFrame, kFramed, kOffset, kGap, kTop, kRaised, kKeep, kScratch, kRows };

    __aicore__ inline Row Number(RowNumber which) const { return values_[which * kHalfRows]; }
    __aicore__ inline uint32_t KeysOf(const Task& task, uint32_t j) const
    {
        return Least(kBlockKeys, task.keys - j * kBlockKeys);
    }
    // Return how many of the tile's first rows see at most so many keys, because of the causal mask.
    __aicore__ inline uint32_t RowsBefore(const Task& task, uint32_t keys) const
    {
        if (!t_.causal) return 0;
        const int64_t first = static_cast<int64_t>(keys) + t_.rows - t_.keys - task.lane[0].first_row;
        return first <= 0 ? 0 : static_cast<uint32_t>(first < rows_ ? first : rows_);
    }
    // Return how many of the tile's first rows see no key of block j.
    __aicore__ inline uint32_t RowsWithoutKeys(const Task& task, uint32_t j) const
    {
        return task.keys <= j * kBlockKeys ? rows_ : RowsBefore(task, j * kBlockKeys);
    }

    __aicore__ inline void Attend(const Task& task)
    {
        rows_ = RoundUp(task.lane[0].rows, kFractal);
        group_ = rows_ * kFractal;
        RowMath all(0, rows_);
        AscendC::PipeBarrier<PIPE_V>();
        all.Set(Number(kReference), kNothing);
        all.Set(Number(kSum), 0.0f);
        all.Set(Number(kFrame), 0.0f);
        AscendC::Duplicate(output_, 0.0f, static_cast<int32_t>(rows_ * t_.dim));
        if (task.steps > 0) {
            products_.Begin(task, rows_);
            for (uint32_t j = 0; j < task.steps; ++j) TakeBlock(task, j);
            AddProduct();
            products_.End();
        }
        Finish(task);
    }

    __aicore__ inline void TakeBlock(const Task& task, uint32_t j)
    {
        FloatTile scores = products_.TakeScores();
        if (j + 1 < task.steps) products_.Advance(task, j + 1);
        AscendC::PipeBarrier<PIPE_V>();
        CopyOut(tile_, scores, rows_ * RoundUp(KeysOf(task, j), kFractal));
        products_.FreeScores(scores);
        if (j % kAnchorBlocks == 0) {
            LoadOffsets(task, j);
        }
        MoveReference(task, j);
        MakeWeights(task, j);
        if (j > 0) AddProduct();
        products_.MakeProduct(task, j);
        if (j > 0) {
            Rescale();
        }
    }

    // So many numbers from L0C to UB, in fractals.
    __aicore__ inline void CopyOut(const FloatTile& to, const FloatTile& c, uint32_t numbers)
    {
        AscendC::DataCopyParams p;
        p.blockCount = 1;
        p.blockLen = numbers / (kFractal * kFractal);
        AscendC::DataCopyEnhancedParams whole;
        whole.blockMode = AscendC::BlockMode::BLOCK_MODE_MATRIX;
        AscendC::DataCopy(to, c, p, whole);
    }

    // Products of the anchor rows of the next blocks.
    __aicore__ inline void LoadOffsets(const Task& task, uint32_t j)
    {
        const uint32_t count = 2 * Least(kAnchorBlocks, task.steps - j);
        anchor_rows_ = RoundUp(count, kFractal);
        FloatTile c = products_.MakeOffsets(task, j, count);
        CopyOut(offsets_, c, anchor_rows_ * rows_);
        products_.FreeOffsets(c);
    }
    // Those of one anchor row, in nats.
    __aicore__ inline void TakeOffsets(const Row& to, uint32_t anchor_row)
    {
        const uint32_t lanes = rows_ / kFractal * kFloatBlock;
        for (uint32_t part = 0; part < kFractal; part += kFloatBlock) {
            AscendC::Muls(to[part], offsets_[anchor_row * kFractal + part], t_.scale, lanes, 1,
                          AscendC::UnaryRepeatParams(2, anchor_rows_ * 2, 8, 8));
        }
    }

    // The tile to nats, and kReference to the row's largest score so far less 11 ln 2. kGap becomes the same as seen from
    // the tile, and kKeep the factor of the output so far.
    __aicore__ inline void MoveReference(const Task& task, uint32_t j)
    {
        const uint32_t anchor_row = 2 * (j % kAnchorBlocks);
        RowMath all(0, rows_), seeing(RowsWithoutKeys(task, j), rows_);
        const uint64_t block = static_cast<uint64_t>(task.kv_head) * t_.blocks + j;
        const float factor = t_.scale / units_.GetValue(block * kUnitCopies);
        FractalTile tile(tile_, work_, rows_);
        const Row reference = Number(kReference), top = Number(kTop), raised = Number(kRaised);
        AscendC::PipeBarrier<PIPE_V>();
        TakeOffsets(Number(kFramed), anchor_row);
        if (j == 0) {  // its frame is its anchor
            all.Set(Number(kOffset), 0.0f);
        } else {
            TakeOffsets(Number(kOffset), anchor_row + 1);
        }
        tile.Scale(factor, RoundUp(KeysOf(task, j), kFractal));
        AscendC::PipeBarrier<PIPE_V>();
        Hide(task, j, tile);
        tile.FoldEight();
        AscendC::PipeBarrier<PIPE_V>();
        tile.FoldFour();
        seeing.Subtract(Number(kScratch), Number(kFrame), Number(kFramed));
        AscendC::PipeBarrier<PIPE_V>();
        tile.FoldTwo();
        if (j > 0) {
            seeing.Add(reference, reference, Number(kScratch));
        }
        seeing.Scale(Number(kFrame), Number(kFramed), 1.0f);
        AscendC::PipeBarrier<PIPE_V>();
        tile.FoldHalves();
        all.Subtract(Number(kGap), reference, Number(kOffset));
        AscendC::PipeBarrier<PIPE_V>();
        tile.Finish(top);
        AscendC::PipeBarrier<PIPE_V>();
        all.Lower(top, top, kBelowLargest);
        AscendC::PipeBarrier<PIPE_V>();
        all.Add(raised, top, Number(kOffset));
        all.Larger(Number(kGap), Number(kGap), top);
        AscendC::PipeBarrier<PIPE_V>();
        all.Larger(raised, raised, reference);
        AscendC::PipeBarrier<PIPE_V>();
        all.Subtract(Number(kKeep), reference, raised);
        AscendC::PipeBarrier<PIPE_V>();
        all.Exponential(Number(kKeep), Number(kKeep));
        all.Scale(reference, raised, 1.0f);
    }

    // Scores that a row does not see become kHiddenNats: keys that do not exist, and with a causal mask later ones.
    __aicore__ inline void Hide(const Task& task, uint32_t j, FractalTile& tile)
    {
        const uint32_t count = KeysOf(task, j);
        if (count < kBlockKeys) {
            tile.HideColumns(count, kHiddenNats);
            AscendC::PipeBarrier<PIPE_V>();
        }
        const uint32_t partial = RowsBefore(task, j * kBlockKeys + count - 1);  // later rows see all
        if (partial == 0) return;
        for (uint32_t r = 0; r < partial; ++r) {
            const uint32_t seen = tasks_.Seen(task, task.lane[0].first_row + r);
            tile.HideInRow(r, seen > j * kBlockKeys ? seen - j * kBlockKeys : 0, kHiddenNats);
        }
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Weights, rounded, to the cube unit.
    __aicore__ inline void MakeWeights(const Task& task, uint32_t j)
    {
        FractalTile tile(tile_, work_, rows_);
        SpreadRows(spread_, Number(kGap), rows_);
        AscendC::PipeBarrier<PIPE_V>();
        tile.Subtract(spread_);
        AscendC::PipeBarrier<PIPE_V>();
        tile.Exponential();
        AscendC::PipeBarrier<PIPE_V>();
        HalfTile weights = weights_out_.AllocTensor<half>();
        tile.ToHalf(weights);
        weights_out_.EnQue(weights);
        weights = weights_out_.DeQue<half>();
        products_.StoreWeights(task, j, weights);
        weights_out_.FreeTensor(weights);
    }

    // O and l of the block before, to those so far. Its scores are no longer needed, and leave their place.
    __aicore__ inline void AddProduct()
    {
        FloatTile product = products_.TakeProduct();
        CopyOut(sums_, product[rows_ * t_.dim], group_);
        for (uint32_t d = 0; d < t_.dim; d += kChunk) {
            const uint32_t numbers = rows_ * Least(kChunk, t_.dim - d);
            AscendC::PipeBarrier<PIPE_V>();
            CopyOut(tile_, product[d * rows_], numbers);
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Add(output_[d * rows_], output_[d * rows_], tile_, static_cast<int32_t>(numbers));
        }
        products_.FreeProduct(product);
        // a sum stands in all 16 columns: of eight of them the largest
        AscendC::ReduceDataBlock<AscendC::ReduceType::MAX>(Number(kScratch), sums_, kFloats, rows_ / kFloatBlock, 1, 2,
                                                           kFractal);
        AscendC::PipeBarrier<PIPE_V>();
        RowMath(0, rows_).Add(Number(kSum), Number(kSum), Number(kScratch));
    }

    // O and l by kKeep.
    __aicore__ inline void Rescale()
    {
        SpreadRows(spread_, Number(kKeep), rows_);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t d = 0; d < t_.dim; d += kFractal) {
            AscendC::Mul(output_[d * rows_], output_[d * rows_], spread_, static_cast<int32_t>(group_));
        }
        RowMath(0, rows_).Multiply(Number(kSum), Number(kSum), Number(kKeep));
    }

    __aicore__ inline void Finish(const Task& task)
    {
        const uint32_t without_keys = RowsWithoutKeys(task, 0), numbers = rows_ * t_.dim;
        RowMath all(0, rows_), never(0, without_keys);
        const uint64_t row = static_cast<uint64_t>(task.head) * RoundUp(t_.rows, kFractal) + task.lane[0].first_row;
        AscendC::PipeBarrier<PIPE_V>();
        if (without_keys > 0) {
            never.Set(Number(kSum), 1.0f);
            for (uint32_t d = 0; d < t_.dim; d += kFractal) {
                AscendC::Duplicate(output_[d * rows_], 0.0f, static_cast<int32_t>(without_keys * kFractal));
            }
        }
        all.Add(Number(kReference), Number(kReference), Number(kFrame));
        AscendC::PipeBarrier<PIPE_V>();
        SpreadRows(spread_, Number(kSum), rows_);
        all.Logarithm(Number(kScratch), Number(kSum));
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t d = 0; d < t_.dim; d += kFractal) {
            AscendC::Div(output_[d * rows_], output_[d * rows_], spread_, static_cast<int32_t>(group_));
        }
        FloatTile lse = row_out_.AllocTensor<float>();
        all.Add(lse, Number(kReference), Number(kScratch));
        AscendC::PipeBarrier<PIPE_V>();
        never.SetBits(lse, kMinusInfinity);
        row_out_.EnQue(lse);
        lse = row_out_.DeQue<float>();
        AscendC::DataCopy(lse_[row], lse, rows_);
        row_out_.FreeTensor(lse);
        // A mean is within FP16's range, but thousands of roundings of O and l may carry O / l beyond it.
        AscendC::Mins(output_, output_, kHalfLargest, static_cast<int32_t>(numbers));
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Maxs(output_, output_, -kHalfLargest, static_cast<int32_t>(numbers));
        AscendC::PipeBarrier<PIPE_V>();
        HalfTile out = tile_out_.AllocTensor<half>();
        for (uint32_t d = 0; d < t_.dim; d += kFractal) {  // four rows of a fractal column at a time, to rows
            AscendC::Cast(out[d], output_[d * rows_], AscendC::RoundMode::CAST_NONE, kFloats, group_ / kFloats,
                          AscendC::UnaryRepeatParams(t_.dim / kFractal, 1, t_.dim / 4, 8));
        }
        tile_out_.EnQue(out);
        out = tile_out_.DeQue<half>();
        AscendC::DataCopy(out_[row * t_.dim], out, numbers);
        tile_out_.FreeTensor(out);
    }

    const AttentionTiling& t_;
    Tasks tasks_;
    Products products_;
    AscendC::GlobalTensor<float> units_, lse_;
    AscendC::GlobalTensor<half> out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> tile_buffer_, work_buffer_, output_buffer_, offset_buffer_,
        spread_buffer_, sums_buffer_, rows_buffer_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> weights_out_, tile_out_, row_out_;
    FloatTile tile_, work_, output_, offsets_, spread_, sums_, values_;
    uint32_t rows_ = 0;         // of the tile, a multiple of 16
    uint32_t group_ = 0;        // numbers of 16 columns
    uint32_t anchor_rows_ = 0;  // whose products are in offsets_, a multiple of 16
};

__aicore__ inline void Attend(const Arguments& arguments, const AttentionTiling& tiling)
{
    AscendC::TPipe pipe;
    CoreAttention(arguments, tiling, pipe).Run();
}

}  // namespace pasa
