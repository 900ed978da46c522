// Where in global memory the operands of the kernels are.
#pragma once

#include "port.h"

namespace pasa {

// Packed sequences are one batch entry, and a sequence's anchor rows and units have the places of its pieces
// (packed_rows.h): tiling.blocks is the number of these places.
struct ShiftArguments {
    GM_ADDR k;        // FP16 (B, Hkv, Skv, D); paper: whole blocks of keys
    GM_ADDR lengths;  // int32 (B,), if tiling.has_lengths
    GM_ADDR starts;   // int32 (sequences + 1,), the first key of each packed sequence and the end, if there are any
    GM_ADDR matrix;   // paper: FP16 (128, 128), M
    GM_ADDR keys;     // FP16 (B, Hkv, Skv, D)
    GM_ADDR anchors;  // exact: FP16 (B, Hkv, anchor_rows blocks, D)
    GM_ADDR units;    // exact: FP32 (B, Hkv, blocks, 8)
};

struct Arguments {
    GM_ADDR q;        // FP16 (B, H, Sq, D)
    GM_ADDR keys;     // FP16 (B, Hkv, Skv, D), K' as shift_keys makes it; paper: whole blocks
    GM_ADDR v;        // FP16 (B, Hkv, Skv, D)
    // Exact: FP16 (B, Hkv, anchor_rows blocks, D). Rows f_j, a_j - f_j, and the mean residual of block j if there are
    // three. In block 1, where a_1 = f_1, the second row is the mean residual.
    GM_ADDR anchors;
    GM_ADDR units;    // exact: FP32 (B, Hkv, blocks, 8), u_j eight times
    GM_ADDR lengths;  // int32 (B,), if tiling.has_lengths
    GM_ADDR starts;   // int32 (2, sequences + 1), of packed sequences: their first rows and the end, and those of keys
    GM_ADDR sinks;    // FP32 (H,), if tiling.has_sinks
    GM_ADDR mask;     // bytes or FP32, if tiling.has_mask; tiling.mask has the strides
    GM_ADDR visits;   // int64 (batches, heads, tiles, blocks + 1, 3), if tiling.has_mask: key_blocks.h
    GM_ADDR out;      // FP16, or BF16 if tiling.to_bf16 (B, H, Sq, D)
    GM_ADDR lse;      // FP32 (B, H, Sq)
    GM_ADDR largest;  // FP32 (B, H, Sq), the largest score of each row, if tiling.has_largest
    GM_ADDR counts;   // FP32 (7, B, H, Sq), of each row, if tiling.has_counts: counted_rows.h
    GM_ADDR scores;   // FP16 (B, H, tiles, blocks, 128, 128), if tiling.keep_scores
    GM_ADDR workspace;
};

struct DecodeArguments {
    GM_ADDR q;        // FP16, rows of D numbers; tokens and heads have the strides of the tiling
    // FP16 (B, Hkv, Skv, D), or if packed (1, Hkv, Tk, D), or pages (pages, slots, Hkv, D); the tiling has the strides
    GM_ADDR k;
    GM_ADDR v;        // as k
    GM_ADDR table;    // int32 (B, table_columns), if tiling.has_table
    GM_ADDR lengths;  // int32 (B,), if tiling.attention.has_lengths
    GM_ADDR starts;   // int32 (B + 1,), if tiling.has_starts; without a table (2, B + 1), those of keys too
    GM_ADDR sinks;    // FP32 (H,), if tiling.attention.has_sinks
    GM_ADDR out;      // as q; BF16 if tiling.attention.to_bf16
    GM_ADDR lse;      // FP32, a number for each row of q
    GM_ADDR workspace;
};

}  // namespace pasa
