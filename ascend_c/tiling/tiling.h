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
constexpr uint32_t kCountRows = 7;  // kinds of counts: kernel/counted_rows.h
// Words of each key block that a tile visits: the block, and bits of 64 rows each.
PASA_ANYWHERE constexpr uint32_t VisitWords(uint32_t tile_rows) { return 1 + tile_rows / kHalfRows; }
constexpr uint32_t kVisitWords = VisitWords(kTileRows);
// Places of pieces of 128 rows of packed sequences, some of which have no rows: kernel/packed_rows.h.
PASA_ANYWHERE constexpr uint32_t PackedPlaces(uint32_t rows, uint32_t sequences)
{
    return rows / kTileRows + sequences;
}
constexpr uint32_t kMaskTileBytes = kHalfRows * kBlockKeys / 8;  // 310P: bits of a mask, of 64 rows and a key block
constexpr uint32_t kPartNumbers = 4;  // 310P: FP32 numbers of each row that a part of its keys leaves behind, beside O
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
    uint64_t offsets;    // FP32 (2 or 3 blocks, 128): products of the anchor rows and the queries
    uint64_t bytes;
};

// A mask, bytes or FP32: elements of a row follow each other. A stride of 0 repeats what it steps over. On a 310P it is
// bits, kMaskTileBytes for each tile of 64 rows and key block, and row_stride lies between the tiles.
struct MaskTiling {
    uint32_t batches;  // batch entries and heads that have a table of visits of their own: 1, or all
    uint32_t heads;
    uint64_t batch_stride;  // in elements
    uint64_t head_stride;
    uint64_t row_stride;
};

struct AttentionTiling {
    uint32_t batch;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t rows;  // queries of a sequence
    uint32_t keys;
    uint32_t sequences;  // exact: packed one behind another, in one batch entry; 0: batch entries alone
    uint32_t dim;     // a multiple of 16
    uint32_t blocks;  // of keys
    uint32_t tile_rows;  // query rows of a tile
    uint32_t token_rows;  // neighbouring rows that see the same keys: 1; 310P: query heads that are rows of a token
    uint32_t parts;       // of the keys of a tile: 1; 310P: as many tasks, whose outputs are merged
    uint32_t lanes;   // query tiles in turn: 2, or 1 where their outputs do not fit, and in the exact recovery
    uint32_t resident;  // exact: products add up in L0C, which holds 128 columns
    uint32_t causal;  // a row sees no key further to the right of its own than `right`
    uint32_t right;
    uint32_t windowed;  // exact: a row sees no key further to the left of its own than `left`
    uint32_t left;
    uint32_t has_mask;     // exact: a row sees no key that the mask hides
    uint32_t adds_mask;    // its elements are FP32, added to scores in nats (-inf hides); otherwise bytes (0 hides)
    uint32_t mask_ahead;   // they are loaded a tile ahead, into a buffer of their own
    uint32_t anchor_rows;  // of a block of keys: 2, or 3 where rows may see their first key in any block
    MaskTiling mask;
    uint32_t saturates;    // the overflow mode: CTRL[48] = 0
    uint32_t has_lengths;  // keys of each batch entry, otherwise all
    uint32_t has_sinks;    // one more score for each row of a head, whose value is 0
    uint32_t has_largest;  // exact: the largest score of each row is wanted
    uint32_t has_counts;   // exact: counts of what score tiles hold are wanted
    uint32_t unbiased_columns;  // columns of a row that unbiased rounding tests to flag it; 0: round to nearest
    uint32_t leaning;           // excess of columns of one sign over the other that flags a row
    uint32_t to_bf16;           // outputs are BF16; otherwise FP16
    uint32_t keep_scores;  // store every FP16 score tile, for diagnosis
    float scale;
    float invariance;    // paper: beta / (1 - beta)
    LaneWorkspace lane;  // of each lane of each group
    uint64_t workspace_bytes;
};

constexpr uint32_t kDecodeRows = 64;                 // query rows of a tile of decoding
constexpr uint32_t kDecodeHalf = kDecodeRows / 2;    // of a vector core
constexpr uint32_t kFrames = 4;  // that a workspace keeps: those of a block and of three others

// Numbers between the keys of neighbours in a cache: pages (or sequences), KV heads, keys.
struct CacheStrides {
    uint64_t page;
    uint64_t head;
    uint32_t row;
};

// A group's workspace of decoding, in bytes from its start. What has two copies is for blocks with an even and an odd
// number, and partial results are those of the group's first segment and of its last. A core of a 310P has only these,
// and each is in one piece.
struct DecodeWorkspace {
    uint64_t keys;     // FP16 (2, 128, D), K'
    uint64_t scores;   // FP32 (2, 64, 128), S
    uint64_t weights;  // FP16 (2, 64, 128), P
    uint64_t product;  // FP32 (2, 64, D), P V
    uint64_t sums;     // FP32 (2, 64, 16): row sums of P, each 16 times
    uint64_t frames;   // FP16 (4, D), what K' is relative to
    uint64_t outputs;  // FP32 (2, 64, D): partial O
    uint64_t states;   // FP32 (2, 2, 2, 32): partial maximum and sum, for either vector core
    uint64_t ends;     // FP16 (2, D): the frame of a partial result
    uint64_t keys_bytes;     // of one copy
    uint64_t product_bytes;  // of one copy
    uint64_t bytes;
};

struct DecodeTiling {
    AttentionTiling attention;  // `rows` are all tokens of q, `keys` the most that a sequence has room for
    uint32_t group;        // query heads of a KV head
    uint32_t tile_tokens;  // of a tile of query rows
    uint32_t tokens;       // of a sequence, if all have as many
    uint32_t has_starts;   // otherwise: the first token of each sequence, and the end; without a table, packed keys too
    uint32_t has_table;    // keys are in pages
    uint32_t table_columns;
    uint32_t pages;
    uint32_t slots;  // keys of a page; without pages, of a sequence, or of all that are packed
    uint64_t q_token;  // numbers between neighbours in q and the output: tokens, groups of heads
    uint64_t q_head;
    CacheStrides k;
    CacheStrides v;
    DecodeWorkspace group_workspace;
};

struct ShiftTiling {
    uint32_t heads;  // batch entries times KV heads
    uint32_t kv_heads;
    uint32_t keys;
    uint32_t sequences;  // exact: packed one behind another; 0: batch entries alone
    uint32_t dim;
    uint32_t blocks;
    uint32_t saturates;
    uint32_t has_lengths;
    uint32_t anchor_rows;  // of a block of keys: 2 or 3
    float unit;
};

}  // namespace pasa
