// Attention by the exact recovery on a core of an Ascend 310P, which has a cube unit and a vector unit. Scores are FP32
// and never leave the core.
#pragma once

#include "products.h"
#include "state.h"

namespace pasa {

// One query tile of 64 rows at a time, and the key blocks that it visits, one step each. While the vector unit makes
// the weights of a step, the cube unit forms the scores of the next; P V of a step is added to the output after the
// softmax of the next. Rows that have not begun have weights of masked scores, which Rescale takes away when they
// begin.
class CoreAttention : private CoreState {
public:
    __aicore__ inline CoreAttention(const Arguments& arguments, const AttentionTiling& tiling, AscendC::TPipe& pipe)
        : CoreState(arguments, tiling, pipe),
          products_(arguments, tiling, tasks_, pipe)
    {
        units_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.units));
        if (t_.has_mask) mask_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(arguments.mask));
        InitTile(kAnchorRows, pipe);
        pipe.InitBuffer(weights_out_, 1, kHalfRows * kBlockKeys * sizeof(half));
        pipe.InitBuffer(mask_in_, 2, kMaskTileBytes);
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
    __aicore__ inline uint32_t KeysOf(const Task& task, uint32_t block) const
    {
        return Least(kBlockKeys, task.keys - block * kBlockKeys);
    }
    // Return how many of the tile's first rows see at most so many keys, because of the causal mask.
    __aicore__ inline uint32_t RowsBefore(const Task& task, uint32_t keys) const
    {
        if (!t_.causal) return 0;
        const int64_t tokens = static_cast<int64_t>(keys) + t_.rows / t_.token_rows - t_.keys - t_.right;
        const int64_t first = tokens * t_.token_rows - task.lane[0].first_row;
        return first <= 0 ? 0 : static_cast<uint32_t>(first < rows_ ? first : rows_);
    }

    __aicore__ inline void Attend(const Task& task)
    {
        BeginRows(task.lane[0].rows);
        seen_ = 0;
        if (task.steps > 0) {
            if (t_.has_mask) LoadMask(task, 0);
            products_.Begin(task, rows_);
            for (uint32_t j = 0; j < task.steps; ++j) TakeBlock(task, j);
            AddBlock(products_);
            products_.End();
        }
        if (t_.parts > 1) {
            StorePart(task);
        } else {
            Finish(task, seen_);
        }
    }

    __aicore__ inline void TakeBlock(const Task& task, uint32_t j)
    {
        const uint32_t block = tasks_.Block(task, j);
        FloatTile scores = products_.TakeScores();
        if (j + 1 < task.steps) {
            products_.Advance(task, j + 1);
            if (t_.has_mask) LoadMask(task, j + 1);
        }
        AscendC::PipeBarrier<PIPE_V>();
        CopyOut(tile_, scores, rows_ * RoundUp(KeysOf(task, block), kFractal));
        products_.FreeScores(scores);
        if (j == 0 || block >= offset_block_ + kAnchorBlocks) LoadOffsets(task, block);
        MoveReference(task, j);
        HalfTile weights = TakeWeights(weights_out_, Number(kGap));
        products_.StoreWeights(task, j, weights);
        weights_out_.FreeTensor(weights);
        if (j > 0) AddBlock(products_);
        products_.MakeProduct(task, j);
        if (j > 0) {
            Rescale();
        }
    }

    // Products of the anchor rows of a block and of those behind it.
    __aicore__ inline void LoadOffsets(const Task& task, uint32_t block)
    {
        const uint32_t end = tasks_.Block(task, task.steps - 1) + 1, count = 2 * Least(kAnchorBlocks, end - block);
        offset_block_ = block;
        anchor_rows_ = RoundUp(count, kFractal);
        FloatTile c = products_.MakeOffsets(task, block, count);
        CopyOut(offsets_, c, anchor_rows_ * rows_);
        products_.FreeOffsets(c);
    }
    // The tile to nats, and kReference to the row's largest score so far less 11 ln 2. kGap becomes the same as seen
    // from the tile, and kKeep the factor of the output so far.
    __aicore__ inline void MoveReference(const Task& task, uint32_t j)
    {
        const uint32_t block = tasks_.Block(task, j), anchor_row = 2 * (block - offset_block_);
        const RowBits now = tasks_.Seeing(task, 0, j, task.lane[0].rows);
        RowMath all(0, rows_), seeing(now);
        const uint64_t unit = static_cast<uint64_t>(task.kv_head) * t_.blocks + block;
        const float factor = t_.scale / units_.GetValue(unit * kUnitCopies);
        FractalTile tile(tile_, work_, rows_);
        const Row reference = Number(kReference), top = Number(kTop), raised = Number(kRaised);
        seen_ |= now;
        AscendC::PipeBarrier<PIPE_V>();
        TakeOffsets(Number(kFramed), anchor_row, anchor_rows_, t_.scale);
        if (block == 0) {  // its frame is its anchor
            all.Set(Number(kOffset), 0.0f);
        } else {
            TakeOffsets(Number(kOffset), anchor_row + 1, anchor_rows_, t_.scale);
        }
        tile.Scale(factor, RoundUp(KeysOf(task, block), kFractal));
        AscendC::PipeBarrier<PIPE_V>();
        Hide(task, block, tile);
        tile.FoldEight();
        AscendC::PipeBarrier<PIPE_V>();
        tile.FoldFour();
        seeing.Subtract(Number(kScratch), Number(kFrame), Number(kFramed));
        AscendC::PipeBarrier<PIPE_V>();
        tile.FoldTwo();
        if (j > 0) {
            seeing.Add(reference, reference, Number(kScratch));
            if (t_.has_largest) {
                seeing.Add(Number(kBest), Number(kBest), Number(kScratch));
            }
        }
        seeing.Scale(Number(kFrame), Number(kFramed), 1.0f);
        AscendC::PipeBarrier<PIPE_V>();
        tile.FoldHalves();
        all.Subtract(Number(kGap), reference, Number(kOffset));
        AscendC::PipeBarrier<PIPE_V>();
        tile.Finish(top);
        AscendC::PipeBarrier<PIPE_V>();
        if (t_.has_largest) {
            seeing.Add(Number(kScratch), top, Number(kOffset));
        }
        all.Lower(raised, top, kBelowLargest);
        AscendC::PipeBarrier<PIPE_V>();
        if (t_.has_largest) {
            seeing.Larger(Number(kBest), Number(kBest), Number(kScratch));
        }
        all.Larger(Number(kGap), Number(kGap), raised);
        all.Add(raised, raised, Number(kOffset));
        AscendC::PipeBarrier<PIPE_V>();
        RaiseReference();
    }

    // Scores that a row does not see become kHiddenNats: keys that do not exist, those beside the edges of a causal
    // mask or a window, and those that a mask hides.
    __aicore__ inline void Hide(const Task& task, uint32_t block, FractalTile& tile)
    {
        const uint32_t count = KeysOf(task, block), first_key = block * kBlockKeys;
        if (count < kBlockKeys) {
            tile.HideColumns(count, kHiddenNats);
            AscendC::PipeBarrier<PIPE_V>();
        }
        const uint32_t partial = RowsBefore(task, first_key + count - 1);  // later rows see all
        for (uint32_t r = 0; r < partial; ++r) {
            const uint32_t seen = tasks_.Seen(task, task.lane[0].first_row + r);
            tile.HideInRow(r, seen > first_key ? seen - first_key : 0, kHiddenNats);
        }
        if (partial > 0) AscendC::PipeBarrier<PIPE_V>();
        if (t_.windowed) HideBeforeWindow(task, first_key, tile);
        if (!t_.has_mask) return;
        AscendC::LocalTensor<uint8_t> bits = mask_in_.DeQue<uint8_t>();
        tile.Keep(bits, kHiddenNats);
        mask_in_.FreeTensor(bits);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Keys to the left of the windows of rows. Other rows' windows begin before the block.
    __aicore__ inline void HideBeforeWindow(const Task& task, uint32_t first_key, FractalTile& tile)
    {
        const uint32_t first_row = task.lane[0].first_row;
        if (tasks_.Before(task, first_row + rows_ - 1) <= first_key) return;
        for (uint32_t r = 0; r < rows_; ++r) {
            const uint32_t before = tasks_.Before(task, first_row + r);
            if (before <= first_key) continue;
            tile.HideBeforeInRow(r, Least(before - first_key, kBlockKeys), kHiddenNats);
        }
        AscendC::PipeBarrier<PIPE_V>();
    }

    // The bits of the mask for a step, which lie as the scores do.
    __aicore__ inline void LoadMask(const Task& task, uint32_t j)
    {
        uint64_t at = uint64_t{tasks_.Block(task, j)} * kMaskTileBytes;
        at += task.lane[0].first_row / kHalfRows * t_.mask.row_stride;
        at += task.head % t_.heads * t_.mask.head_stride;
        at += task.batch * t_.mask.batch_stride;
        AscendC::DataCopyParams p;
        p.blockCount = FractalTile::kGroups;
        p.blockLen = rows_ / kFractal;
        p.srcGap = (kHalfRows - rows_) / kFractal;
        AscendC::LocalTensor<uint8_t> bits = mask_in_.AllocTensor<uint8_t>();
        AscendC::DataCopy(bits, mask_[at], p);
        mask_in_.EnQue(bits);
    }

    // What a part of the keys leaves behind, for CoreMerge.
    __aicore__ inline void StorePart(const Task& task)
    {
        const AscendC::GlobalTensor<float> to = parts_[PartPlace(task)];
        StoreRows(to, to[kPartNumbers * kHalfRows], kPartNumbers);
    }

    Products products_;
    AscendC::GlobalTensor<float> units_;
    AscendC::GlobalTensor<uint8_t> mask_;
    AscendC::TQue<AscendC::TPosition::VECIN, 2> mask_in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> weights_out_;
    RowBits seen_ = 0;           // rows that have seen a key
    uint32_t offset_block_ = 0;  // the first block whose products are in offsets_
    uint32_t anchor_rows_ = 0;   // whose products are there, a multiple of 16
};

__aicore__ inline void Attend(const Arguments& arguments, const AttentionTiling& tiling)
{
    AscendC::TPipe pipe;
    CoreAttention(arguments, tiling, pipe).Run();
}

}  // namespace pasa
