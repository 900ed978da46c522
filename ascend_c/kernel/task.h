// Which rows and keys a group works on: the cube side and the vector side walk through the same tasks.
#pragma once

#include "port.h"

namespace pasa {

// Flags between the cube core and the two vector cores of a group; a lane has its own.
// Set by the cube core on FIX, waited for by both vector cores:
constexpr uint16_t kScoresReady = 0;   // an FP16 score tile is in the workspace
constexpr uint16_t kWideReady = 2;     // the verdict was read, and a tile that was asked for is there in FP32
constexpr uint16_t kProductReady = 4;  // P V is there; before the first block: the offsets
// Set by both vector cores on MTE3, waited for by the cube core:
constexpr uint16_t kVerdictReady = 6;  // whether the score tile has to come in FP32
constexpr uint16_t kWeightsReady = 8;  // P is there, and the reference of the next score tile
constexpr uint8_t kGroup = 2;          // the mode of these flags: a cube core and its vector cores

__aicore__ inline uint32_t Least(uint32_t a, uint32_t b) { return a < b ? a : b; }
__aicore__ inline uint32_t Largest(uint32_t a, uint32_t b) { return a < b ? b : a; }
// A length that somebody else wrote: from 0 to `most`.
__aicore__ inline uint32_t Clamped(int32_t length, uint32_t most)
{
    return length <= 0 ? 0 : Least(static_cast<uint32_t>(length), most);
}
__aicore__ inline uint32_t DivideUp(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// One query tile.
struct LaneTask {
    uint32_t first_row = 0;
    uint32_t rows = 0;   // 0: the lane idles
    uint32_t steps = 0;  // key blocks that some row sees
    // Rows that the units compute: with one row Mmad would read its operand as a plain vector, so a row has a twin.
    __aicore__ inline uint32_t Computed() const { return Largest(rows, 2); }
};

// The tiles of a group that share keys.
struct Task {
    uint32_t batch = 0;
    uint32_t head = 0;
    uint32_t kv_head = 0;  // over all batch entries
    uint32_t keys = 0;     // that exist in this batch entry
    uint32_t steps = 0;    // the larger of the lanes'
    LaneTask lane[kLanes];
};

class Tasks {
public:
    __aicore__ inline Tasks(const AttentionTiling& tiling, GM_ADDR lengths) : tiling_(tiling)
    {
        if (tiling_.has_lengths) lengths_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(lengths));
        slots_ = DivideUp(tiling_.rows, kTileRows * tiling_.lanes);
        total_ = slots_ * tiling_.batch * tiling_.heads;
    }

    // The group's task number `turn`; false when there is none. Long tasks are dealt first, to and fro, so that with a
    // causal mask all groups get about the same work.
    __aicore__ inline bool Get(uint32_t turn, uint32_t group, uint32_t groups, Task& task)
    {
        const uint32_t index = turn * groups + (turn % 2 == 0 ? group : groups - 1 - group);
        if (index >= total_) return false;
        const uint32_t head = index % (tiling_.batch * tiling_.heads);
        const uint32_t slot = slots_ - 1 - index / (tiling_.batch * tiling_.heads);
        task.batch = head / tiling_.heads;
        task.head = head;
        task.kv_head = task.batch * tiling_.kv_heads + head % tiling_.heads / (tiling_.heads / tiling_.kv_heads);
        task.keys = tiling_.has_lengths ? Clamped(lengths_.GetValue(task.batch), tiling_.keys) : tiling_.keys;
        task.steps = 0;
        for (uint32_t i = 0; i < kLanes; ++i) {
            LaneTask& lane = task.lane[i];
            lane.first_row = (slot * tiling_.lanes + i) * kTileRows;
            const bool used = i < tiling_.lanes && lane.first_row < tiling_.rows;
            lane.rows = used ? Least(kTileRows, tiling_.rows - lane.first_row) : 0;
            lane.steps = used ? DivideUp(Seen(task, lane.first_row + lane.rows - 1), kBlockKeys) : 0;
            task.steps = Largest(task.steps, lane.steps);
        }
        return true;
    }

    // Keys that a row sees, which are the first ones. The mask is aligned to the last query and the last key.
    __aicore__ inline uint32_t Seen(const Task& task, uint32_t row) const
    {
        if (!tiling_.causal) return task.keys;
        const int64_t seen = static_cast<int64_t>(row) + 1 + tiling_.keys - tiling_.rows;
        return seen <= 0 ? 0 : Least(task.keys, static_cast<uint32_t>(seen));
    }

private:
    const AttentionTiling& tiling_;
    AscendC::GlobalTensor<int32_t> lengths_;
    uint32_t slots_ = 0;
    uint32_t total_ = 0;
};

struct ShiftArguments {
    GM_ADDR k;            // FP16 (B, Hkv, Skv, D)
    GM_ADDR lengths;      // int32 (B,), if tiling.has_lengths
    GM_ADDR matrix;       // paper: FP16 (n, n), M of a block of min(128, Skv) keys
    GM_ADDR last_matrix;  // paper: of the last block, if it has fewer
    GM_ADDR keys;         // FP16 (B, Hkv, Skv, D), exact: D + 16
    GM_ADDR anchors;      // exact: FP16 (B, Hkv, 2 blocks, D)
    GM_ADDR units;        // exact: FP32 (B, Hkv, blocks, 8)
};

// What overflow gives: infinity, or the largest number (CTRL[48]). As found again at the end: whether the register
// outlives a launch is not documented, and torch_npu sets it for its own operators.
class OverflowMode {
public:
    __aicore__ inline explicit OverflowMode(bool saturates)
        : before_(AscendC::GetSaturationFlag<AscendC::SaturationMode::FLOAT>())
    {
        AscendC::SetSaturationFlag<AscendC::SaturationMode::FLOAT>(saturates);
    }
    __aicore__ inline ~OverflowMode() { AscendC::SetSaturationFlag<AscendC::SaturationMode::FLOAT>(before_); }

private:
    bool before_;
};

struct Arguments {
    GM_ADDR q;        // FP16 (B, H, Sq, D)
    GM_ADDR keys;     // FP16 (B, Hkv, Skv, D [+ 16]), K' as shift_keys makes it
    GM_ADDR v;        // FP16 (B, Hkv, Skv, D)
    GM_ADDR anchors;  // exact: FP16 (B, Hkv, 2 blocks, D); rows a_1, mean residual of block 1, then a_j - a_1 high, low
    GM_ADDR units;    // exact: FP32 (B, Hkv, blocks, 8), u_j eight times
    GM_ADDR lengths;  // int32 (B,), if tiling.has_lengths
    GM_ADDR out;      // FP16 (B, H, Sq, D)
    GM_ADDR lse;      // FP32 (B, H, Sq)
    GM_ADDR scores;   // FP16 (B, H, tiles, blocks, 128, 128), if tiling.keep_scores
    GM_ADDR workspace;
};

}  // namespace pasa
