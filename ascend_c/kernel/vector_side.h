// A vector core's part of attention: softmax over half of the rows of a tile, statistics, reference and verdict.
#pragma once

#include "vector_state.h"

namespace pasa {

constexpr float kNothing = -0x1p126f;  // a running maximum before the first key: finite, and below every score
constexpr float kReach = 8.0f;         // nats above its reference at which FP16 stores a score too coarsely
constexpr float kZeroWeight = 104.0f;  // exp(-104) is zero even among FP32's subnormals
constexpr uint32_t kMinusInfinity = 0xff800000;  // the device's headers have no INFINITY

template <bool kExact>
class VectorSide : private VectorState {
public:
    __aicore__ inline VectorSide(const Arguments& arguments, const AttentionTiling& tiling, AscendC::TPipe& pipe)
        : VectorState(arguments, tiling, kExact, pipe)
    {
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
        MakeWeights(task, i, j, rows);
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
        if (kExact) all.Scale(Number(kTop), Number(kTop), factor_[i]);
        const bool wide = kExact && Judge(i, j, rows, narrow, seeing);
        if (!wide) AscendC::Cast(score_tile_, narrow, AscendC::RoundMode::CAST_NONE, rows * kBlockKeys);
        narrow_in_.FreeTensor(narrow);
        if (wide) {
            LoadWide(task, i, j, rows, all);
        } else if (kExact) {
            AscendC::PipeBarrier<PIPE_V>();
            AscendC::Muls(score_tile_, score_tile_, factor_[i], rows * kBlockKeys);
        }
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
        AscendC::Muls(score_tile_, wide, factor_[i], rows * kBlockKeys);
        wide_in_.FreeTensor(wide);
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
        bool wanted = Extreme<AscendC::ReduceType::MAX>(Number(kFirst), Number(kWork)) > kReach;
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
        return Extreme<AscendC::ReduceType::MIN>(Number(kFirst), Number(kWork)) <= -kHalfLargest;
    }

    // exp(score - largest), rounded, to the cube core; and its sum.
    __aicore__ inline void MakeWeights(const Task& task, uint32_t i, uint32_t j, uint32_t rows)
    {
        Spread(spread_, Number(kTop), rows);
        for (uint32_t part = 0; part < 2; ++part) {
            AscendC::Sub(score_tile_[part * kFloats], score_tile_[part * kFloats], spread_, kFloats, rows,
                         AscendC::BinaryRepeatParams(1, 1, 0, kTileBlocks, kTileBlocks, 1));
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
        RowMath all(0, rows);
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
        const uint32_t padded = RoundUp(rows, kFloatBlock);
        FloatTile in = offset_in_.AllocTensor<float>();
        AscendC::DataCopyParams p;
        p.blockCount = 2;
        p.blockLen = padded / kFloatBlock;
        p.srcGap = (kTileRows - padded) / kFloatBlock;
        p.dstGap = (kHalfRows - padded) / kFloatBlock;
        AscendC::DataCopy(in, offsets_[i][2 * j * kTileRows], p);
        const uint64_t block = static_cast<uint64_t>(task.kv_head) * t_.blocks + j;
        AscendC::DataCopy(in[2 * kHalfRows], units_[block * kUnitCopies], kUnitCopies);
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
            AscendC::Brcb(spread[part * kHalfRows * kFractal], term, DivideUp(rows, kFloatBlock), AscendC::BrcbRepeatParams(1, 8));
            all.ToFloat(part == 0 ? rounded : rest, term);
        }
        all.Add(wanted, rounded, rest);
        HalfTile out = reference_out_.AllocTensor<half>();
        AscendC::Duplicate(out, static_cast<half>(0.0f), kHalfRows * kFractal);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t part = 0; part < 2; ++part) {
            const uint64_t column = uint64_t{0x0001000100010001} << part;
            uint64_t mask[2] = {column, column};
            AscendC::Adds(out, spread[part * kHalfRows * kFractal], static_cast<half>(0.0f), mask, DivideUp(rows, kFloatBlock),
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
        AscendC::PipeBarrier<PIPE_V>();
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

    // O = keep O + gain (P V).
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
        never.SetBits(lse, kMinusInfinity);
        row_out_.EnQue(lse);
        lse = row_out_.DeQue<float>();
        AscendC::DataCopyExtParams p;
        p.blockCount = 1;
        p.blockLen = rows * sizeof(float);
        AscendC::DataCopyPad(lse_[FirstRow(task, lane)], lse, p);
        row_out_.FreeTensor(lse);
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
};

}  // namespace pasa
