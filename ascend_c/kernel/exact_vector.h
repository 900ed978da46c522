// A vector core's part of attention by the exact recovery: softmax over half of the rows of a tile, verdict, reference.
#pragma once

#include "counted_rows.h"

namespace pasa {

// Nats above what its row's weights are relative to, at which a score moves that.
constexpr float kMoveReach = 4.0f;
// Weights are 2^10 exp(score - reference): e^4 times that is within FP16, and they are zero only 24.3 nats below.
constexpr float kLift = 0x1p10f, kLiftNats = 6.931471806f;
// Nats between the reference of a tile and that of the weights which are not subtracted.
constexpr float kAligned = 0x1p-14f;

class ExactVector : private CountedRows {
public:
    __aicore__ inline ExactVector(const Arguments& arguments, const AttentionTiling& tiling, AscendC::TPipe& pipe)
        : CountedRows(arguments, tiling, true, pipe)
    {
    }

    __aicore__ inline void Run()
    {
        Task task;
        for (uint32_t turn = 0; tasks_.Get(turn, Group(), AscendC::GetBlockNum(), task); ++turn) {
            if (task.lane[0].rows == 0) continue;
            Begin(task);
            for (uint32_t j = 0; j < task.steps; ++j) TakeScores(task, j);
            End(task);
        }
    }

private:
    // What decides on a tile: the largest of its rows' numbers.
    struct Extremes {
        float reached;  // of a score above its reference (of its distance, if that is a guess), in units of the tile
        float ahead;    // of a score above what the weights are relative to, nats
        float gap;      // between that and the reference of the tile, nats
        float apart;    // of what the reference of block j + 2 has to be moved by, because of its anchor and frame
    };

    __aicore__ inline void Begin(const Task& task)
    {
        const LaneTask& lane = task.lane[0];
        const uint32_t rows = OwnRows(lane.Twinned());
        settled_ = false;
        for (bool& plain : plain_) plain = false;
        seen_ = before_ = 0;
        if (rows > 0) {
            RowMath all(0, rows);
            all.Set(Number(0, kMaximum), kNothing);
            all.Set(Number(0, kSum), 0.0f);
            all.Set(Number(0, kFrame), 0.0f);
            if (t_.has_largest) all.Set(Number(kBest), kNothing);
            AscendC::Duplicate(Output(0), 0.0f, rows * t_.dim);
            AscendC::PipeBarrier<PIPE_V>();
            if (t_.has_counts) BeginCounts();
        }
        if (task.steps == 0) return;
        if (HidesByBits() && rows > 0) {
            LoadMask(task, tasks_.Block(task, 0), rows);
            TakeMask(task, tasks_.Block(task, 0), rows);
        }
        if (t_.mask_ahead && rows > 0) LoadAddedMask(task, 0, rows);
        AscendC::CrossCoreWaitFlag<kGroup>(kProductReady);
        if (rows > 0) MakeGuesses(task, rows);
        AscendC::CrossCoreSetFlag<kGroup, PIPE_MTE3>(kWeightsReady + 1);
    }

    // The products that are left, and the output.
    __aicore__ inline void End(const Task& task)
    {
        const uint32_t rows = OwnRows(task.lane[0].Twinned()), slot = (task.steps + 1) % 2;
        if (task.steps > 0) {
            AscendC::CrossCoreWaitFlag<kGroup>(kProductReady + slot);
            AscendC::PipeBarrier<PIPE_V>();
            if (rows > 0) AddProducts(slot, rows);
        }
        Finish(task, 0, kLift, seen_);
        const uint32_t stored = OwnRows(task.lane[0].rows);
        if (t_.has_counts && stored > 0) StoreCounts(task, stored);
    }

    __aicore__ inline void TakeScores(const Task& task, uint32_t j)
    {
        const uint32_t slot = j % 2, rows = OwnRows(task.lane[0].Twinned());
        AscendC::CrossCoreWaitFlag<kGroup>(kScoresReady + slot);
        if (rows == 0) {
            TellVerdict(slot, 0);
            AscendC::CrossCoreWaitFlag<kGroup>(kWideReady + slot);
            AscendC::CrossCoreSetFlag<kGroup, PIPE_MTE3>(kWeightsReady + slot);
            if (j > 0 && !t_.resident) AscendC::CrossCoreWaitFlag<kGroup>(kProductReady + 1 - slot);
            return;
        }
        const bool refers = j + 2 < task.steps;
        float next_factor = 0.0f;
        AscendC::PipeBarrier<PIPE_V>();
        FindRows(task, j, rows);
        const Extremes extremes = LoadScores(task, j, rows, refers, next_factor);
        const float factor = factor_[slot];
        const bool wide = NeedsWide(rows, extremes.reached, factor);
        bool moves = wide;
        if (extremes.ahead > kMoveReach) moves = true;
        const bool brings = refers && !HasReference(slot, extremes.apart, moves, next_factor);
        const bool answered = wide || t_.has_counts;  // the cube core's answer is needed at once
        TellVerdict(slot, (answered ? kWantsWide : 0) | (moves && j > 0 && t_.resident ? kWantsOutput : 0) |
                              (brings ? kBringsReference : 0));
        if (answered) {
            AscendC::CrossCoreWaitFlag<kGroup>(kWideReady + slot);
        }
        if (t_.has_counts) CountScores(task, j, rows, now_, wide, moves && seen_ != 0);
        if (wide) LoadWide(task, j, rows, factor);
        if (t_.has_largest) FindLargest(slot);
        if (moves) MoveReference(slot, rows, wide);
        if (!next_.IsDone()) {
            if (moves) {
                next_.Restart();
            }
        } else if (brings) {
            BeginReference(slot, rows, Number(0, kMaximum), next_factor, begin_, begin_ | late_, false);
        }
        MakeWeights(slot, rows, wide || t_.scale > kLargestLifted, !moves && extremes.gap <= kAligned);
        if (brings) MakeReference(slot, rows, next_factor);
        settled_ = !moves;
        before_ = seen_;
        seen_ |= now_;
        if (!answered) AscendC::CrossCoreWaitFlag<kGroup>(kWideReady + slot);
        AscendC::CrossCoreSetFlag<kGroup, PIPE_MTE3>(kWeightsReady + slot);
        if (HidesByBits() && j + 1 < task.steps) TakeMask(task, tasks_.Block(task, j + 1), rows);
        if (j == 0) return;
        if (!t_.resident) AscendC::CrossCoreWaitFlag<kGroup>(kProductReady + 1 - slot);
        if (!moves && t_.resident) return;
        AddProducts(1 - slot, rows);
        if (moves) {
            Rescale(rows);
        }
    }

    // Which rows see what. Those that see their first key in the next step refer to that tile's guess in the tile after
    // it: until then they hold it in the place of a maximum and a frame. When they begin, they have no maximum. Where a
    // mask is added, every tile refers to its guess, because R holds what the mask adds.
    __aicore__ inline void FindRows(const Task& task, uint32_t j, uint32_t rows)
    {
        now_ = SeenRows(task, j, rows);
        late_ = j + 2 < task.steps ? SeeFirst(task, j + 1, rows, seen_ | now_) : 0;
        begin_ = j + 2 < task.steps ? SeeFirst(task, j + 2, rows, seen_ | now_ | late_) : 0;
        if (t_.anchor_rows < 3) return;
        RowMath(now_ & ~seen_).Set(Number(0, kMaximum), kNothing);
        if (t_.adds_mask && j + 2 < task.steps) {
            begin_ = RowsBetween(0, rows);
        }
        if (late_ == 0) return;
        const uint32_t other = 1 - j % 2;
        FinishReference();  // of the next step
        AscendC::PipeBarrier<PIPE_V>();
        RowMath(late_).Scale(Number(0, kMaximum), Number(other, kOffset), 1.0f);
        RowMath(late_).Scale(Number(0, kFrame), Framed(other), 1.0f);
    }

    // The score tile in nats to score_tile_, with masked scores replaced; the largest of each row to kTop in units of
    // the tile, and to kLarger in nats; what the weights are relative to, seen from the tile, to kGap. And if there is
    // a block j + 2, its frame to kSecond, the change of frame to kCarried, and what its anchor subtracts to kNext.
    __aicore__ inline Extremes LoadScores(const Task& task, uint32_t j, uint32_t rows, bool refers, float& next_factor)
    {
        const uint32_t slot = j % 2, block = tasks_.Block(task, j), count = KeysOf(task, block);
        const RowBits guessed = now_ & ~before_;
        RowMath all(0, rows), seeing(now_);
        if (refers) LoadOffsets(task, j + 2, rows);
        HalfTile narrow = narrow_in_.AllocTensor<half>();
        AscendC::DataCopy(narrow, scores_[slot], rows * kBlockKeys);
        narrow_in_.EnQue(narrow);
        narrow = narrow_in_.DeQue<half>();
        if (count < kBlockKeys) {  // there is nothing behind
            HideColumns(narrow, count, rows, 0.0f);
            AscendC::PipeBarrier<PIPE_V>();
        }
        AscendC::Cast(score_tile_, narrow, AscendC::RoundMode::CAST_NONE, rows * kBlockKeys);
        narrow_in_.FreeTensor(narrow);
        if (HidesByBits() && j + 1 < task.steps) LoadMask(task, tasks_.Block(task, j + 1), rows);
        seeing.Subtract(Number(kFirst), Number(0, kFrame), Framed(slot));
        all.Set(Number(kReached), 0.0f);
        all.Set(Number(kGap), 0.0f);
        next_.Advance();
        AscendC::PipeBarrier<PIPE_V>();
        if (refers) {
            TakeNextOffsets(rows, next_factor);
        } else {
            all.Set(Number(kCarried), 0.0f);
            all.Set(Number(kNext), 0.0f);
        }
        next_.Advance();
        Hide(task, 0, block, rows, score_tile_);
        RowReduction<AscendC::ReduceType::MAX> top(work_, rows);
        top.Blocks(score_tile_);
        seeing.Add(Number(0, kMaximum), Number(0, kMaximum), Number(kFirst));
        if (t_.has_largest) {
            seeing.Add(Number(kBest), Number(kBest), Number(kFirst));
        }
        seeing.Scale(Number(0, kFrame), Framed(slot), 1.0f);
        AscendC::PipeBarrier<PIPE_V>();
        top.Halves();
        if (factor_[slot] != 1.0f) AscendC::Muls(score_tile_, score_tile_, factor_[slot], rows * kBlockKeys);
        seeing.Subtract(Number(kGap), Number(0, kMaximum), Number(slot, kOffset));
        if (refers) {
            all.Subtract(Number(kCarried), Number(0, kFrame), Number(kSecond));
            if (!MayKeep(slot, next_factor)) {
                BeginReference(slot, rows, Number(0, kMaximum), next_factor, begin_, begin_ | late_, false);
            }
        }
        AscendC::PipeBarrier<PIPE_V>();
        top.Finish(Number(kTop));
        all.Absolute(Number(kDistance), Number(kGap));
        all.Absolute(Number(kFirst), Number(kNext));
        all.Absolute(Number(kAhead), Number(kCarried));
        next_.Advance();
        AscendC::PipeBarrier<PIPE_V>();
        seeing.Larger(Number(kReached), Number(kTop), Number(slot, kRaised));
        all.Scale(Number(kLarger), Number(kTop), factor_[slot]);
        all.Larger(Number(kFirst), Number(kFirst), Number(kAhead));
        next_.Advance();
        AscendC::PipeBarrier<PIPE_V>();
        all.Subtract(Number(kAhead), Number(kLarger), Number(kGap));
        if (guessed != 0) {
            RowMath(guessed).Absolute(Number(kReached), Number(kTop));
        }
        next_.Advance();
        AscendC::PipeBarrier<PIPE_V>();
        return ReadExtremes(rows);
    }

    __aicore__ inline void TakeNextOffsets(uint32_t rows, float& next_factor)
    {
        RowMath all(0, rows);
        float unit;
        FloatTile in = TakeOffsets(unit);
        next_factor = t_.scale / unit;
        all.Scale(Number(kSecond), in, t_.scale);
        all.Scale(Number(kNext), in[kHalfRows], unit);
        if (t_.anchor_rows == 3) all.Scale(Number(kGuess), in[kGuessRow], unit);
        offset_in_.FreeTensor(in);
    }

    __aicore__ inline Extremes ReadExtremes(uint32_t rows)
    {
        const Row from[4] = {Number(kReached), Number(kAhead), Number(kDistance), Number(kFirst)};
        float found[4];
        next_.Advance();
        for (uint32_t i = 0; i < 4; ++i) {
            AscendC::ReduceRepeat<AscendC::ReduceType::MAX>(work_[i * kFloatBlock], from[i], rows, 1, 1, 1, 8,
                                                            AscendC::ReduceOrder::ORDER_ONLY_VALUE);
        }
        const AscendC::TEventID done = GetTPipePtr()->FetchEventID(AscendC::HardEvent::V_S);
        AscendC::SetFlag<AscendC::HardEvent::V_S>(done);
        AscendC::WaitFlag<AscendC::HardEvent::V_S>(done);
        for (uint32_t i = 0; i < 4; ++i) found[i] = work_.GetValue(i * kFloatBlock);
        return {found[0], found[1], found[2], found[3]};
    }

    // The largest score of each row so far, in its frame.
    __aicore__ inline void FindLargest(uint32_t slot)
    {
        RowMath seeing(now_);
        const Row here = Number(kDistance);
        seeing.Scale(here, Number(kTop), TopFactor(slot));
        AscendC::PipeBarrier<PIPE_V>();
        seeing.Add(here, here, Number(slot, kOffset));
        AscendC::PipeBarrier<PIPE_V>();
        seeing.Larger(Number(kBest), Number(kBest), here);
    }

    // What the weights are relative to becomes the running maximum. kGap becomes the same seen from the tile, and kKeep
    // the factor of the output so far.
    __aicore__ inline void MoveReference(uint32_t slot, uint32_t rows, bool wide)
    {
        RowMath all(0, rows);
        const Row maximum = Number(0, kMaximum), top = Number(kLarger), highest = Number(kTop);
        if (wide) {
            all.Scale(top, Number(kTop), TopFactor(slot));
            AscendC::PipeBarrier<PIPE_V>();
        }
        all.Add(highest, top, Number(slot, kOffset));
        all.Larger(Number(kGap), Number(kGap), top);
        AscendC::PipeBarrier<PIPE_V>();
        all.Larger(highest, highest, maximum);
        AscendC::PipeBarrier<PIPE_V>();
        all.Subtract(Number(kKeep), maximum, highest);
        AscendC::PipeBarrier<PIPE_V>();
        all.Exponential(Number(kKeep), Number(kKeep));
        all.Scale(maximum, highest, 1.0f);
    }

    // Weights, rounded, to the cube core. `late`: scores may be too large to subtract a few nats from. `aligned`: they
    // are relative to what the weights are relative to.
    __aicore__ inline void MakeWeights(uint32_t slot, uint32_t rows, bool late, bool aligned)
    {
        RowMath all(0, rows);
        const float lift = late ? 0.0f : kLiftNats;
        if (aligned) {
            AscendC::Adds(score_tile_, score_tile_, lift, rows * kBlockKeys);
        } else {
            all.Lower(Number(kGap), Number(kGap), lift);
            AscendC::PipeBarrier<PIPE_V>();
            Spread(spread_, Number(kGap), rows);
            next_.Advance();
            AscendC::PipeBarrier<PIPE_V>();
            SubtractSpread(rows);
        }
        next_.Advance();
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Exp(score_tile_, score_tile_, rows * kBlockKeys);
        next_.Advance();
        AscendC::PipeBarrier<PIPE_V>();
        if (late) {
            AscendC::Muls(score_tile_, score_tile_, kLift, rows * kBlockKeys);
            next_.Advance();
            AscendC::PipeBarrier<PIPE_V>();
        }
        HalfTile weights = tile_out_.AllocTensor<half>();
        AscendC::Cast(weights, score_tile_, AscendC::RoundMode::CAST_RINT, rows * kBlockKeys);
        next_.Advance();
        tile_out_.EnQue(weights);
        weights = tile_out_.DeQue<half>();
        AscendC::DataCopy(weights_[slot], weights, rows * kBlockKeys);
        tile_out_.FreeTensor(weights);
    }

    // Return if the cube core may have the reference of block j + 2 already, as far as can be said before the scores
    // are known. Where it cannot, the reference is formed beside the softmax.
    __aicore__ inline bool MayKeep(uint32_t slot, float next_factor) const
    {
        return plain_[slot] && settled_ && next_factor == factor_[slot];
    }

    // Return if it has: the reference of block j, if neither block has an offset or a frame of its own, and nothing has
    // moved since that was made.
    __aicore__ inline bool HasReference(uint32_t slot, float apart, bool moves, float next_factor)
    {
        bool has = MayKeep(slot, next_factor), plain = true;
        if (apart != 0.0f) plain = false;
        if ((begin_ | late_) != 0) plain = false;
        if (!plain || moves) has = false;
        plain_[slot] = plain;
        return has;
    }

    // The reference of block j + 2 takes the place of that of block j. Its offset is ready after two more steps, which
    // the next tile takes.
    __aicore__ inline void MakeReference(uint32_t slot, uint32_t rows, float factor)
    {
        factor_[slot] = factor;
        RowMath(0, rows).Scale(Framed(slot), Number(kSecond), 1.0f);
        SendReference(slot, rows);
    }

    // O and l of the blocks before, which the cube core has added up.
    __aicore__ inline void AddProducts(uint32_t slot, uint32_t rows)
    {
        const uint32_t whole = rows / kFloatBlock, rest = rows % kFloatBlock;
        FloatTile sums = sums_in_.AllocTensor<float>();
        AscendC::DataCopy(sums, sums_[slot], rows * kFractal);
        sums_in_.EnQue(sums);
        AddProduct(0, slot, rows);
        sums = sums_in_.DeQue<float>();
        // a sum stands in all 16 columns: of eight of them the largest
        if (whole > 0) {
            AscendC::ReduceDataBlock<AscendC::ReduceType::MAX>(Number(kRowSum), sums, kFloats, whole, 1, 2, kFractal);
        }
        if (rest > 0) {
            AscendC::ReduceDataBlock<AscendC::ReduceType::MAX>(Number(kRowSum)[whole * kFloatBlock],
                                                               sums[whole * kFloatBlock * kFractal],
                                                               rest * kFloatBlock, 1, 1, 2, kFractal);
        }
        sums_in_.FreeTensor(sums);
        AscendC::PipeBarrier<PIPE_V>();
        RowMath(0, rows).Add(Number(0, kSum), Number(0, kSum), Number(kRowSum));
    }

    // O and l by kKeep.
    __aicore__ inline void Rescale(uint32_t rows)
    {
        Spread(spread_, Number(kKeep), rows);
        AscendC::PipeBarrier<PIPE_V>();
        ScaleOutput(0, rows);
        RowMath(0, rows).Multiply(Number(0, kSum), Number(0, kSum), Number(kKeep));
    }

    // Rows of this core: those that see a key of this step's block; those that saw one of an earlier step's, and of one
    // before the last step's; those that see their first key in the next step, and in the one after it.
    RowBits now_ = 0, seen_ = 0, before_ = 0, late_ = 0, begin_ = 0;
    bool settled_ = false;            // the references of the weights did not move in the last block
    bool plain_[2] = {false, false};  // the reference in the workspace is that of the weights, without an offset
};

}  // namespace pasa
