// Numbers that the host passes to the kernels, from shape and chip. Pure C++17, for the host and the device.
#pragma once

#include <cstdint>

#include "integers.h"

namespace pasa {

constexpr uint32_t kTileRows = 128;  // query rows of a tile; each of the two vector cores takes half of them
constexpr uint32_t kHalfRows = kTileRows / 2;
constexpr uint32_t kBlockKeys = 128;  // keys of a block
constexpr uint32_t kFractal = 16;     // elements of a side of a cube fractal, and FP16 numbers in 32 bytes
constexpr float kReferenceWeight = -2.0f / kFractal;  // of the reference's columns: half are its high term, half low
constexpr uint32_t kLanes = 2;        // query tiles that a group works on in turn
// Numbers of a tile of 64 rows in L1, where 128 rows lie between its columns: multiply.h.
PASA_ANYWHERE constexpr uint32_t HalfTileNumbers(uint32_t columns)
{
    return kTileRows * (columns - kFractal) + kHalfRows * kFractal;
}
constexpr uint32_t kMaxDim = 256;
constexpr uint32_t kChunk = 128;  // columns of an operand in one half of L0A or L0B
constexpr uint32_t kBlockBytes = 32;  // of the vector cores' memory: the smallest copy
constexpr uint32_t kWaveColumns = 64;  // most columns of a row that unbiased rounding tests
constexpr uint32_t kVerdictWords = kBlockBytes / sizeof(int32_t);  // of each vector core
constexpr uint32_t kUnitCopies = kBlockBytes / sizeof(float);      // of the unit of a block of keys

// A lane's workspace, in bytes from its start. Every part starts at a multiple of 512. The exact recovery has one lane,
// and uses the second workspace for blocks with an odd number.
struct LaneWorkspace {
    uint64_t scores;     // FP16 (128, 128), S'
    uint64_t wide;       // FP32 (128, 128), a rescued S'
    uint64_t weights;    // FP16 (128, 128), P
    uint64_t product;    // FP32 (128, D), P V
    uint64_t sums;       // FP32 (128, 16), exact: row sums of P, each 16 times
    uint64_t reference;  // FP16 (128, 16): rho, its high term in even columns, its low term in odd ones
    uint64_t verdict;    // int32 (2, 8), exact: what a vector core wants of the cube core
    uint64_t offsets;    // FP32 (2 blocks, 128): products of the anchor rows and the queries
    uint64_t bytes;
};

struct AttentionTiling {
    uint32_t batch;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t rows;  // queries of a sequence
    uint32_t keys;
    uint32_t dim;     // a multiple of 16
    uint32_t blocks;  // of keys
    uint32_t tile_rows;  // query rows of a tile
    uint32_t lanes;   // query tiles in turn: 2, or 1 where their outputs do not fit, and in the exact recovery
    uint32_t resident;  // exact: products add up in L0C, which holds 128 columns
    uint32_t causal;
    uint32_t saturates;    // the overflow mode: CTRL[48] = 0
    uint32_t has_lengths;  // keys of each batch entry, otherwise all
    uint32_t has_sinks;    // one more score for each row of a head, whose value is 0
    uint32_t unbiased_columns;  // columns of a row that unbiased rounding tests to flag it; 0: round to nearest
    uint32_t leaning;           // excess of columns of one sign over the other that flags a row
    uint32_t to_bf16;           // outputs are BF16; otherwise FP16
    uint32_t keep_scores;  // store every FP16 score tile, for diagnosis
    float scale;
    float invariance;    // paper: beta / (1 - beta)
    LaneWorkspace lane;  // of each lane of each group
    uint64_t workspace_bytes;
};

struct ShiftTiling {
    uint32_t heads;  // batch entries times KV heads
    uint32_t kv_heads;
    uint32_t keys;
    uint32_t dim;
    uint32_t blocks;
    uint32_t saturates;
    uint32_t has_lengths;
    float unit;
};

}  // namespace pasa
