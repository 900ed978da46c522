// A vector core's part of attention: softmax over half of the rows of a tile, statistics, reference and verdict.
#pragma once

#include "rows.h"
#include "task.h"

namespace pasa {

constexpr float kNothing = -0x1p126f;     // a running maximum before the first key: finite, and below every score
constexpr float kReach = 8.0f;            // nats above its reference at which FP16 stores a score too coarsely
constexpr float kZeroWeight = 104.0f;     // exp(-104) is zero even among FP32's subnormals

template <bool kExact>
class VectorSide {
public:
    __aicore__ inline VectorSide(const Arguments& arguments, const AttentionTiling& tiling, AscendC::TPipe& pipe)
        : t_(tiling),
          tasks_(tiling, arguments.lengths),
          parts_(LaneParts(tiling.dim, tiling.blocks)),
          skipped_(AscendC::GetSubBlockIdx() * kHalfRows)
    {
        if (kExact) units_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.units));
        out_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(arguments.out));
        lse_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(arguments.lse));
        for (uint32_t i = 0; i < kLanes; ++i) {
            GM_ADDR at = arguments.workspace + (Group() * kLanes + i) * tiling.lane_bytes;
            const uint64_t tile = static_cast<uint64_t>(skipped_) * kBlockKeys;
            scores_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + parts_.scores) + tile);
            wide_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + parts_.wide) + tile);
            weights_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + parts_.weights) + tile);
            product_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + parts_.product) + skipped_ * tiling.dim);
            reference_[i].SetGlobalBuffer(reinterpret_cast<__gm__ half*>(at + parts_.reference) + skipped_ * kFractal);
            verdict_[i].SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(at + parts_.verdict) +
                                        AscendC::GetSubBlockIdx() * kVerdictWords);
            offsets_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at + parts_.offsets) + skipped_);
        }
        InitBuffers(pipe);
    }

    __aicore__ inline void Run()
    {
        Task task;
        for (uint32_t turn = 0; tasks_.Get(turn, Group(), AscendC::GetBlockNum(), task); ++turn) {
            for (uint32_t i = 0; i < kLanes; ++i) Begin(task, i);
            for (uint32_t j = 0; j < task.steps; ++j) {
                for (uint32_t i = 0; i < kLanes; ++i) {
                    if (j < task.lane[i].steps) TakeScores(task, i, j);
                }
                for (uint32_t i = 0; i < kLanes; ++i) {
                    if (j < task.lane[i].steps) TakeProduct(task, i);
                }
            }
            for (uint32_t i = 0; i < kLanes; ++i) Finish(task, i);
        }
    }

private:
    using Row = AscendC::LocalTensor<float>;
    using HalfTile = AscendC::LocalTensor<half>;
    using FloatTile = AscendC::LocalTensor<float>;

    // Numbers of rows. Those of a lane come first, once for each lane.
    enum LaneRow { kMaximum, kSum, kFrame, kOffset, kKeep, kGain, kLaneRows };
    enum SharedRow { kTop = kLanes * kLaneRows, kHere, kRowSum, kFirst, kSecond, kThird, kWork, kRows = kWork + 2 };

    static __aicore__ inline uint64_t Group() { return AscendC::GetBlockIdx() / 2; }

    __aicore__ inline void InitBuffers(AscendC::TPipe& pipe)
    {
        const uint32_t width = Least(t_.dim, kChunk);
        pipe.InitBuffer(narrow_in_, 1, kHalfRows * kBlockKeys * sizeof(half));
        pipe.InitBuffer(wide_in_, 1, kHalfRows * Largest(width, kBlockKeys) * sizeof(float));
        pipe.InitBuffer(tile_out_, 1, kHalfRows * kBlockKeys * sizeof(half));
        pipe.InitBuffer(row_out_, 1, kHalfRows * sizeof(float));
        pipe.InitBuffer(scores_buffer_, kHalfRows * kBlockKeys * sizeof(float));
        pipe.InitBuffer(output_buffer_, t_.lanes * kHalfRows * t_.dim * sizeof(float));
        pipe.InitBuffer(rows_buffer_, kRows * kHalfRows * sizeof(float));
        pipe.InitBuffer(spread_buffer_, kHalfRows * kBlockBytes);
        pipe.InitBuffer(half_row_buffer_, kHalfRows * sizeof(half));
        if (kExact) {
            pipe.InitBuffer(offset_in_, 1, 2 * kHalfRows * sizeof(float) + kBlockBytes);
            pipe.InitBuffer(reference_out_, 1, kHalfRows * kFractal * sizeof(half));
            pipe.InitBuffer(verdict_out_, 1, kVerdictWords * sizeof(int32_t));
            pipe.InitBuffer(half_spread_buffer_, 2 * kHalfRows * kBlockBytes);
        }
        values_ = rows_buffer_.Get<float>();
        score_tile_ = scores_buffer_.Get<float>();
        spread_ = spread_buffer_.Get<float>();
        AscendC::Duplicate(values_, 0.0f, kRows * kHalfRows);  // calls that take whole blocks read behind the last row
        AscendC::Duplicate(half_row_buffer_.Get<half>(), static_cast<half>(0.0f), kHalfRows);
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline Row Number(uint32_t shared) const { return values_[shared * kHalfRows]; }
    __aicore__ inline Row Number(uint32_t lane, LaneRow row) const
    {
        return values_[(lane * kLaneRows + row) * kHalfRows];
    }
    __aicore__ inline FloatTile Output(uint32_t lane)
    {
        return output_buffer_.Get<float>()[lane * kHalfRows * t_.dim];
    }
    // How many of this core's rows there are, of so many in the tile.
    __aicore__ inline uint32_t Mine(uint32_t rows) const
    {
        return rows <= skipped_ ? 0 : Least(kHalfRows, rows - skipped_);
    }
    // How many of this core's first rows see no key of block j.
    __aicore__ inline uint32_t Blind(const Task& task, const LaneTask& lane, uint32_t j, uint32_t rows) const
    {
        if (task.keys <= j * kBlockKeys) return rows;
        return RowsBefore(lane, j * kBlockKeys, rows);
    }

    // How many of this core's first rows see at most so many keys, because of the causal mask.
    __aicore__ inline uint32_t RowsBefore(const LaneTask& lane, uint32_t keys, uint32_t rows) const
    {
        if (!t_.causal) return 0;
        const int64_t first = static_cast<int64_t>(keys) + t_.rows - t_.keys - (lane.first_row + skipped_);
        return first <= 0 ? 0 : static_cast<uint32_t>(first < rows ? first : rows);
    }

    __aicore__ inline void Begin(const Task& task, uint32_t i)
    {
        const LaneTask& lane = task.lane[i];
        const uint32_t rows = Mine(lane.Computed());
        if (lane.rows == 0) return;
        if (rows > 0) {
            RowMath all(0, rows);
            all.Set(Number(i, kMaximum), kNothing);
            all.Set(Number(i, kSum), 0.0f);
            all.Set(Number(i, kFrame), 0.0f);
            all.Set(Number(i, kOffset), 0.0f);
            AscendC::Duplicate(Output(i), 0.0f, rows * t_.dim);
        }
        if (!kExact || lane.steps == 0) return;
        AscendC::CrossCoreWaitFlag<kGroup>(kProductReady + i);
        if (rows > 0) NextReference(task, i, 0, rows);
        AscendC::CrossCoreSetFlag<kGroup, PIPE_MTE3>(kWeightsReady + i);
    }

    // ---- one score tile: weights for the cube core, statistics for here

    __aicore__ inline void TakeScores(const Task& task, uint32_t i, uint32_t j)
    {
        const LaneTask& lane = task.lane[i];
        const uint32_t rows = Mine(lane.Computed());
        AscendC::CrossCoreWaitFlag<kGroup>(kScoresReady + i);
        if (rows == 0) {
            if (kExact) {
                TellVerdict(i, false);
                AscendC::CrossCoreWaitFlag<kGroup>(kWideReady + i);
            }
            AscendC::CrossCoreSetFlag<kGroup, PIPE_MTE3>(kWeightsReady + i);
            return;
        }
        const uint32_t blind = Blind(task, lane, j, rows);
        RowMath all(0, rows);
        RowMath seeing(blind, rows);
        all.Set(Number(i, kKeep), 1.0f);
        all.Set(Number(i, kGain), 0.0f);
        const bool wide = LoadScores(task, i, j, rows, seeing);
        MakeWeights(task, i, j, rows, all);
        if (kExact && !wide) AscendC::CrossCoreWaitFlag<kGroup>(kWideReady + i);
        if (!kExact) MoveFrame(task, i, j, seeing);
        AddStatistics(i, seeing);
        if (kExact && j + 1 < lane.steps) NextReference(task, i, j + 1, rows);
        AscendC::CrossCoreSetFlag<kGroup, PIPE_MTE3>(kWeightsReady + i);
    }

    // Scaled scores to score_tile_ and the largest of each row to kTop. True if they came in FP32.
    __aicore__ inline bool LoadScores(const Task& task, uint32_t i, uint32_t j, uint32_t rows, RowMath& seeing)
    {
        HalfTile narrow = narrow_in_.AllocTensor<half>();
        AscendC::DataCopy(narrow, scores_[i], rows * kBlockKeys);
        narrow_in_.EnQue(narrow);
        narrow = narrow_in_.DeQue<half>();
        if (!kExact) TakeMean(task, j, rows, narrow);
        Hide<half>(task, i, j, rows, narrow, -kHalfLargest);
        AscendC::Maxs(narrow, narrow, static_cast<half>(-kHalfLargest), rows * kBlockKeys);  // -inf has no weight either
        AscendC::PipeBarrier<PIPE_V>();
        HalfTile largest = half_row_buffer_.Get<half>();
        AscendC::ReduceRepeat<AscendC::ReduceType::MAX>(largest, narrow, kBlockKeys, rows, 1, 1,
                                                        kRepeatBytes / kBlockBytes,
                                                        AscendC::ReduceOrder::ORDER_ONLY_VALUE);
        AscendC::PipeBarrier<PIPE_V>();
        RowMath all(0, rows);
        all.ToFloat(Number(kTop), largest);
        all.Scale(Number(kTop), Number(kTop), factor_[i]);
        const bool wide = kExact && Judge(i, j, rows, narrow, seeing);
        if (!wide) {
            AscendC::Cast(score_tile_, narrow, AscendC::RoundMode::CAST_NONE, rows * kBlockKeys);
            AscendC::PipeBarrier<PIPE_V>();
        }
        narrow_in_.FreeTensor(narrow);
        if (wide) LoadWide(task, i, j, rows, all);
        AscendC::Muls(score_tile_, score_tile_, factor_[i], rows * kBlockKeys);
        return wide;
    }

    __aicore__ inline void LoadWide(const Task& task, uint32_t i, uint32_t j, uint32_t rows, RowMath& all)
    {
        AscendC::CrossCoreWaitFlag<kGroup>(kWideReady + i);
        FloatTile wide = wide_in_.AllocTensor<float>();
        AscendC::DataCopy(wide, wide_[i], rows * kBlockKeys);
        wide_in_.EnQue(wide);
        wide = wide_in_.DeQue<float>();
        Hide<float>(task, i, j, rows, wide, kNothing);
        ReduceRows<AscendC::ReduceType::MAX>(Number(kTop), Number(kWork), wide, rows, all);
        all.Scale(Number(kTop), Number(kTop), factor_[i]);
        AscendC::Adds(score_tile_, wide, 0.0f, rows * kBlockKeys);
        AscendC::PipeBarrier<PIPE_V>();
        wide_in_.FreeTensor(wide);
    }

    // Scores that a row does not see become `value`: keys that do not exist, and with a causal mask later ones.
    template <typename T>
    __aicore__ inline void Hide(const Task& task, uint32_t i, uint32_t j, uint32_t rows,
                                const AscendC::LocalTensor<T>& tile, float value)
    {
        const uint32_t count = Least(kBlockKeys, task.keys - j * kBlockKeys);
        HideColumns(tile, count, rows, value);
        const uint32_t partial = RowsBefore(task.lane[i], j * kBlockKeys + count - 1, rows);  // later rows see all
        const uint32_t blind = RowsBefore(task.lane[i], j * kBlockKeys, rows);
        for (uint32_t r = 0; r < partial; ++r) {
            const uint32_t seen = r < blind ? 0 : tasks_.Seen(task, task.lane[i].first_row + skipped_ + r) - j * kBlockKeys;
            HideColumns(tile[r * kBlockKeys], seen, 1, value);
        }
        if (partial > 0) AscendC::PipeBarrier<PIPE_V>();
    }

    // Columns from `first` on, of so many rows.
    template <typename T>
    __aicore__ inline void HideColumns(const AscendC::LocalTensor<T>& tile, uint32_t first, uint32_t rows, float value)
    {
        constexpr uint32_t lanes = kRepeatBytes / sizeof(T);
        for (uint32_t part = first / lanes; part < kBlockKeys / lanes; ++part) {
            const uint32_t kept = first > part * lanes ? first - part * lanes : 0;
            uint64_t mask[2];
            mask[0] = kept >= 64 ? 0 : ~uint64_t{0} << kept;
            mask[1] = lanes <= 64 ? 0 : kept <= 64 ? ~uint64_t{0} : ~uint64_t{0} << (kept - 64);
            AscendC::Duplicate(tile[part * lanes], static_cast<T>(value), mask, rows, 1,
                               kBlockKeys * sizeof(T) / kBlockBytes);
        }
        if (rows > 1) AscendC::PipeBarrier<PIPE_V>();
    }

    // Whether a score stands so far above its reference (in a first tile: off it) that the tile has to come in FP32.
    __aicore__ inline bool Judge(uint32_t i, uint32_t j, uint32_t rows, const HalfTile& narrow, RowMath& seeing)
    {
        RowMath(0, kHalfRows).Set(Number(kFirst), 0.0f);
        if (j == 0) {
            seeing.Absolute(Number(kFirst), Number(kTop));
        } else {
            seeing.Add(Number(kFirst), Number(kFirst), Number(kTop));
        }
        bool wanted = Extreme<AscendC::ReduceType::MAX>(Number(kFirst)) > kReach;
        if (kHalfLargest * factor_[i] < kZeroWeight) wanted = wanted || HasBottom(narrow, rows);
        TellVerdict(i, wanted);
        return wanted;
    }

    __aicore__ inline void TellVerdict(uint32_t i, bool wanted)
    {
        AscendC::LocalTensor<int32_t> verdict = verdict_out_.AllocTensor<int32_t>();
        AscendC::Duplicate(verdict, wanted ? 1 : 0, static_cast<int32_t>(kVerdictWords));
        verdict_out_.EnQue(verdict);
        verdict = verdict_out_.DeQue<int32_t>();
        AscendC::DataCopy(verdict_[i], verdict, kVerdictWords);
        verdict_out_.FreeTensor(verdict);
        AscendC::CrossCoreSetFlag<kGroup, PIPE_MTE3>(kVerdictReady + i);
    }

    // With a tiny scale even FP16's lowest number has weight. Hidden scores hold it too: then a tile is wide in vain.
    __aicore__ inline bool HasBottom(const HalfTile& narrow, uint32_t rows)
    {
        RowMath(0, kHalfRows).Set(Number(kFirst), 0.0f);
        HalfTile lowest = half_row_buffer_.Get<half>();
        AscendC::ReduceRepeat<AscendC::ReduceType::MIN>(lowest, narrow, kBlockKeys, rows, 1, 1,
                                                        kRepeatBytes / kBlockBytes,
                                                        AscendC::ReduceOrder::ORDER_ONLY_VALUE);
        AscendC::PipeBarrier<PIPE_V>();
        RowMath(0, rows).ToFloat(Number(kFirst), lowest);
        return Extreme<AscendC::ReduceType::MIN>(Number(kFirst)) <= -kHalfLargest;
    }

    template <AscendC::ReduceType kType>
    __aicore__ inline float Extreme(const Row& row)
    {
        AscendC::ReduceRepeat<kType>(Number(kWork), row, kFloats, 1, 1, 1, 8, AscendC::ReduceOrder::ORDER_ONLY_VALUE);
        const AscendC::TEventID done = GetTPipePtr()->FetchEventID(AscendC::HardEvent::V_S);
        AscendC::SetFlag<AscendC::HardEvent::V_S>(done);
        AscendC::WaitFlag<AscendC::HardEvent::V_S>(done);
        return Number(kWork).GetValue(0);
    }

    // exp(score - largest), rounded, to the cube core; and its sum.
    __aicore__ inline void MakeWeights(const Task& task, uint32_t i, uint32_t j, uint32_t rows, RowMath& all)
    {
        Spread(spread_, Number(kTop), rows);
        for (uint32_t part = 0; part < 2; ++part) {
            AscendC::Sub(score_tile_[part * kFloats], score_tile_[part * kFloats], spread_, kFloats, rows,
                         AscendC::BinaryRepeatParams(1, 1, 0, 16, 16, 1));
        }
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Exp(score_tile_, score_tile_, rows * kBlockKeys);
        AscendC::PipeBarrier<PIPE_V>();
        Hide<float>(task, i, j, rows, score_tile_, 0.0f);
        HalfTile weights = tile_out_.AllocTensor<half>();
        AscendC::Cast(weights, score_tile_, AscendC::RoundMode::CAST_RINT, rows * kBlockKeys);
        AscendC::PipeBarrier<PIPE_V>();
        if (kExact) {  // the sum of what multiplies V, so that the output is a mean of values
            AscendC::Cast(score_tile_, weights, AscendC::RoundMode::CAST_NONE, rows * kBlockKeys);
            AscendC::PipeBarrier<PIPE_V>();
        }
        ReduceRows<AscendC::ReduceType::SUM>(Number(kRowSum), Number(kWork), score_tile_, rows, all);
        tile_out_.EnQue(weights);
        weights = tile_out_.DeQue<half>();
        AscendC::DataCopy(weights_[i], weights, rows * kBlockKeys);
        tile_out_.FreeTensor(weights);
    }

    // m, l, and what the old and the new output are multiplied by (Algorithm 1, lines 16 to 20).
    __aicore__ inline void AddStatistics(uint32_t i, RowMath& seeing)
    {
        const Row maximum = Number(i, kMaximum), sum = Number(i, kSum), keep = Number(i, kKeep), gain = Number(i, kGain);
        seeing.Add(Number(kHere), Number(kTop), Number(i, kOffset));
        if (!kExact) seeing.Add(maximum, maximum, Number(kSecond));  // the carry
        seeing.Larger(Number(kFirst), maximum, Number(kHere));
        seeing.Subtract(keep, maximum, Number(kFirst));
        seeing.Exponential(keep, keep);
        seeing.Multiply(sum, sum, keep);
        seeing.Subtract(gain, Number(kHere), Number(kFirst));
        seeing.Exponential(gain, gain);
        seeing.Multiply(Number(kRowSum), Number(kRowSum), gain);
        seeing.Add(sum, sum, Number(kRowSum));
        seeing.Scale(maximum, Number(kFirst), 1.0f);
    }

    // ---- exact recovery: the reference of block j, and the offset that brings its scores into the row's frame

    __aicore__ inline void NextReference(const Task& task, uint32_t i, uint32_t j, uint32_t rows)
    {
        const uint32_t padded = (rows + kFloatBlock - 1) / kFloatBlock * kFloatBlock;
        FloatTile in = offset_in_.AllocTensor<float>();
        AscendC::DataCopyParams p;
        p.blockCount = 2;
        p.blockLen = padded / kFloatBlock;
        p.srcGap = (kTileRows - padded) / kFloatBlock;
        p.dstGap = (kHalfRows - padded) / kFloatBlock;
        AscendC::DataCopy(in, offsets_[i][2 * j * kTileRows], p);
        const uint64_t block = static_cast<uint64_t>(task.kv_head) * t_.blocks + j;
        AscendC::DataCopy(in[2 * kHalfRows], units_[block * kFloatBlock], kFloatBlock);
        offset_in_.EnQue(in);
        in = offset_in_.DeQue<float>();
        const AscendC::TEventID loaded = GetTPipePtr()->FetchEventID(AscendC::HardEvent::MTE2_S);
        AscendC::SetFlag<AscendC::HardEvent::MTE2_S>(loaded);
        AscendC::WaitFlag<AscendC::HardEvent::MTE2_S>(loaded);
        const float unit = in[2 * kHalfRows].GetValue(0);
        RowMath all(0, rows);
        const Row offset = Number(i, kOffset), wanted = Number(kFirst);
        if (j == 0) {  // the mean score of the block; in the frame of its own anchor there is no offset
            all.Scale(Number(i, kFrame), in, t_.scale);
            all.Set(offset, 0.0f);
            all.Scale(wanted, in[kHalfRows], 1.0f);
        } else {
            all.Add(offset, in, in[kHalfRows]);
            all.Set(Number(kSecond), t_.scale);
            all.Divide(wanted, Number(i, kMaximum), Number(kSecond));
            all.Subtract(wanted, wanted, offset);
        }
        offset_in_.FreeTensor(in);
        all.Scale(wanted, wanted, unit);
        StoreReference(i, rows, wanted, all);
        all.Scale(wanted, wanted, 1.0f / unit);
        all.Add(offset, wanted, offset);
        all.Scale(offset, offset, t_.scale);
        factor_[i] = t_.scale / unit;
    }

    // `wanted` as two FP16 numbers in the first columns of a fractal, for the cube core; and their sum in its place.
    __aicore__ inline void StoreReference(uint32_t i, uint32_t rows, const Row& wanted, RowMath& all)
    {
        const Row rounded = Number(kSecond), rest = Number(kThird);
        HalfTile term = half_row_buffer_.Get<half>();
        HalfTile spread = half_spread_buffer_.Get<half>();
        for (uint32_t part = 0; part < 2; ++part) {  // high, then what it leaves
            if (part == 1) all.Subtract(rest, wanted, rounded);
            all.Clamp(rest, part == 0 ? wanted : rest, kHalfLargest);
            all.ToHalf(term, rest);
            AscendC::Brcb(spread[part * kHalfRows * kFractal], term, (rows + 7) / 8, AscendC::BrcbRepeatParams(1, 8));
            all.ToFloat(part == 0 ? rounded : rest, term);
        }
        all.Add(wanted, rounded, rest);
        HalfTile out = reference_out_.AllocTensor<half>();
        AscendC::Duplicate(out, static_cast<half>(0.0f), kHalfRows * kFractal);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t part = 0; part < 2; ++part) {
            const uint64_t column = uint64_t{0x0001000100010001} << part;
            uint64_t mask[2] = {column, column};
            AscendC::Adds(out, spread[part * kHalfRows * kFractal], static_cast<half>(0.0f), mask, (rows + 7) / 8,
                          AscendC::UnaryRepeatParams(1, 1, 8, 8));
        }
        reference_out_.EnQue(out);
        out = reference_out_.DeQue<half>();
        AscendC::DataCopy(reference_[i], out, rows * kFractal);
        reference_out_.FreeTensor(out);
    }

    // ---- published recovery: the mean of S' and the moving frame (Algorithm 1, lines 13 to 17)

    __aicore__ inline void TakeMean(const Task& task, uint32_t j, uint32_t rows, const HalfTile& narrow)
    {
        const uint32_t count = Least(kBlockKeys, task.keys - j * kBlockKeys);
        HideColumns(narrow, count, rows, 0.0f);
        AscendC::Cast(score_tile_, narrow, AscendC::RoundMode::CAST_NONE, rows * kBlockKeys);
        AscendC::PipeBarrier<PIPE_V>();
        RowMath all(0, rows);
        ReduceRows<AscendC::ReduceType::SUM>(Number(kThird), Number(kWork), score_tile_, rows, all);
        all.Set(Number(kSecond), static_cast<float>(count));
        all.Divide(Number(kThird), Number(kThird), Number(kSecond));
    }

    // F_j, the offset of this tile and the carry of the running maximum (kSecond); the mean is in kThird.
    __aicore__ inline void MoveFrame(const Task& task, uint32_t i, uint32_t j, RowMath& seeing)
    {
        const Row mean = Number(kThird), carry = Number(kSecond), frame = Number(i, kFrame), offset = Number(i, kOffset);
        const Row current = Number(kFirst);
        if (j == 0) {
            seeing.Scale(frame, mean, 1.0f);
            seeing.Set(carry, 0.0f);
            return;
        }
        seeing.Scale(current, frame, static_cast<float>(j));
        seeing.Add(current, current, mean);
        seeing.Set(carry, static_cast<float>(j + 1));
        seeing.Divide(current, current, carry);
        seeing.Subtract(carry, frame, current);
        seeing.Scale(carry, carry, t_.invariance);
        seeing.Subtract(offset, mean, current);
        seeing.Scale(offset, offset, t_.invariance);
        if (task.keys - j * kBlockKeys < kBlockKeys) {  // a block of its own size has its own M and invariance
            seeing.Scale(mean, mean, t_.last_invariance - t_.invariance);
            seeing.Add(offset, offset, mean);
        }
        seeing.Scale(frame, current, 1.0f);
    }

    // ---- output

    // O = keep O + gain (P V), 64 columns at a time.
    __aicore__ inline void TakeProduct(const Task& task, uint32_t i)
    {
        const uint32_t rows = Mine(task.lane[i].Computed());
        AscendC::CrossCoreWaitFlag<kGroup>(kProductReady + i);
        if (rows == 0) return;
        for (uint32_t d = 0; d < t_.dim; d += kChunk) {
            const uint32_t width = Least(kChunk, t_.dim - d);
            FloatTile product = wide_in_.AllocTensor<float>();
            AscendC::DataCopyParams p;
            p.blockCount = rows;
            p.blockLen = width / kFloatBlock;
            p.srcGap = (t_.dim - width) / kFloatBlock;
            AscendC::DataCopy(product, product_[i][d], p);
            wide_in_.EnQue(product);
            product = wide_in_.DeQue<float>();
            FloatTile out = Output(i)[d];
            ScaleRows(out, t_.dim, Number(i, kKeep), rows, width);
            ScaleRows(product, width, Number(i, kGain), rows, width);
            for (uint32_t c = 0; c < width; c += kFloats) {
                AscendC::Add(out[c], out[c], product[c], Least(kFloats, width - c), rows,
                             AscendC::BinaryRepeatParams(1, 1, 1, t_.dim / kFloatBlock, t_.dim / kFloatBlock,
                                                         width / kFloatBlock));
            }
            wide_in_.FreeTensor(product);
        }
    }

    // Multiply the rows of a tile, `stride` numbers apart, by a number each.
    __aicore__ inline void ScaleRows(const FloatTile& tile, uint32_t stride, const Row& factors, uint32_t rows,
                                     uint32_t width)
    {
        Spread(spread_, factors, rows);
        for (uint32_t c = 0; c < width; c += kFloats) {
            AscendC::Mul(tile[c], tile[c], spread_, Least(kFloats, width - c), rows,
                         AscendC::BinaryRepeatParams(1, 1, 0, stride / kFloatBlock, stride / kFloatBlock, 1));
        }
        AscendC::PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void Finish(const Task& task, uint32_t i)
    {
        const LaneTask& lane = task.lane[i];
        const uint32_t rows = Mine(lane.rows);
        if (rows == 0) return;
        const uint32_t blind = Blind(task, lane, 0, rows);  // rows that see nothing at all
        RowMath all(0, rows), never(0, blind), seeing(blind, rows);
        const Row sum = Number(i, kSum);
        never.Set(sum, 1.0f);
        StoreOutput(task, i, rows);
        AscendC::LocalTensor<float> lse = row_out_.AllocTensor<float>();
        if (!kExact) all.Scale(Number(i, kFrame), Number(i, kFrame), t_.invariance);
        all.Add(Number(kFirst), Number(i, kMaximum), Number(i, kFrame));
        all.Logarithm(Number(kSecond), sum);
        all.Add(lse, Number(kFirst), Number(kSecond));
        never.Set(lse, -INFINITY);
        row_out_.EnQue(lse);
        lse = row_out_.DeQue<float>();
        AscendC::DataCopyExtParams p;
        p.blockCount = 1;
        p.blockLen = rows * sizeof(float);
        AscendC::DataCopyPad(lse_[FirstRow(task, lane)], lse, p);
        row_out_.FreeTensor(lse);
    }

    __aicore__ inline uint64_t FirstRow(const Task& task, const LaneTask& lane) const
    {
        return static_cast<uint64_t>(task.head) * t_.rows + lane.first_row + skipped_;
    }

    __aicore__ inline void StoreOutput(const Task& task, uint32_t i, uint32_t rows)
    {
        for (uint32_t d = 0; d < t_.dim; d += kChunk) {
            const uint32_t width = Least(kChunk, t_.dim - d);
            const FloatTile out = Output(i)[d];
            HalfTile rounded = tile_out_.AllocTensor<half>();
            Spread(spread_, Number(i, kSum), rows);
            for (uint32_t c = 0; c < width; c += kFloats) {
                const uint32_t columns = Least(kFloats, width - c);
                AscendC::Div(out[c], out[c], spread_, columns, rows,
                             AscendC::BinaryRepeatParams(1, 1, 0, t_.dim / kFloatBlock, t_.dim / kFloatBlock, 1));
                AscendC::PipeBarrier<PIPE_V>();
                AscendC::Cast(rounded[c], out[c], AscendC::RoundMode::CAST_RINT, columns, rows,
                              AscendC::UnaryRepeatParams(1, 1, width / kFractal, t_.dim / kFloatBlock));
            }
            tile_out_.EnQue(rounded);
            rounded = tile_out_.DeQue<half>();
            AscendC::DataCopyParams p;
            p.blockCount = rows;
            p.blockLen = width / kFractal;
            p.dstGap = (t_.dim - width) / kFractal;
            AscendC::DataCopy(out_[FirstRow(task, task.lane[i]) * t_.dim + d], rounded, p);
            tile_out_.FreeTensor(rounded);
        }
    }

    const AttentionTiling& t_;
    Tasks tasks_;
    LaneWorkspace parts_;
    uint32_t skipped_;            // rows of a tile before this core's
    float factor_[kLanes] = {1.0f, 1.0f};  // from units of S' to nats; the paper folds the scale into K'
    AscendC::GlobalTensor<half> out_;
    AscendC::GlobalTensor<float> lse_, units_;
    AscendC::GlobalTensor<half> scores_[kLanes], weights_[kLanes], reference_[kLanes];
    AscendC::GlobalTensor<float> wide_[kLanes], product_[kLanes], offsets_[kLanes];
    AscendC::GlobalTensor<int32_t> verdict_[kLanes];
    AscendC::TQue<AscendC::TPosition::VECIN, 1> narrow_in_, wide_in_, offset_in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> tile_out_, row_out_, reference_out_, verdict_out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> scores_buffer_, output_buffer_, rows_buffer_, spread_buffer_,
        half_row_buffer_, half_spread_buffer_;
    AscendC::LocalTensor<float> values_, score_tile_, spread_;
};

}  // namespace pasa
