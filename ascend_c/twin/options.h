// How a launch is emulated.
#pragma once

#include <cstdint>

#include "chip.h"

namespace twin {

enum class Mode {
    eager,     // work is done at the call and every access is checked for order: missing synchronisation is a fault
    deferred,  // work is done as late (even seeds) or as early (odd seeds) as the flags allow: it gives wrong numbers
};

enum class Overflow { inf_nan, saturate };

// What a device may do otherwise than the twin assumes, for tests of probes that have to notice it. Numbers may be
// wrong.
enum class Deviation {
    none,
    exp,            // results off by up to one unit in the last place
    ln,
    div,            // results one unit in the last place larger
    sum_order,      // Mmad adds from the last product to the first
    tail_rows,      // NaN in rows of a fractal beyond the matrix reaches the first row of a product
    fixpipe_rows,   // Fixpipe takes the rows that are stored for those that the accumulator has
    fill,           // Fill leaves half of the blocks out
    overflow_mode,  // SetSaturationFlag does nothing
    integers,       // products of int32_t have the digits of float
    compare_bits,   // bits of a comparison are stored with the highest first
    compare_nan,    // NaN is below every number
    accumulator,    // a product changes the accumulator that was written before it
    scalar_cache,   // DataCacheCleanAndInvalid does nothing
    sync_all,       // SyncAll waits for no other core
    // Of a 310P:
    no_saturation,       // overflow gives infinities
    float_saturation,    // FP32 results saturate, too
    float_sums,          // sums of FP32 numbers are one unit in the last place larger
    stored_infinities,   // FP32 infinities become the largest numbers on their way to memory
    half_rounding,       // Cast to FP16 by CAST_NONE rounds towards zero
    subnormal_results,   // vector calls give 0 for subnormal FP16 results
    subnormal_operands,  // Mmad takes subnormal FP16 operands for 0
    l0c_fractals,        // a copy from L0C to UB counts fractals of 512 bytes
    l1_gaps,             // a copy from UB to L1 leaves no gaps there
    launch_order,        // a launch does not see what the one before it stored
};

// What one block is: a cube core with two vector cores, or one core. `ai_core` is that of a 310P: a cube unit and a
// vector unit, and it always saturates.
enum class Shape { mix_1_2, aiv_only, aic_only, ai_core };

struct Options {
    Mode mode = Mode::eager;
    uint64_t seed = 0;
    Shape shape = Shape::mix_1_2;
    Overflow overflow = Overflow::inf_nan;  // what CTRL[48] holds when the kernel starts (torch_npu sets inf_nan)
    bool jitter = false;                    // Exp and Ln off by -1, 0 or +1 ulp, by seed and input
    // Exp and Ln take subnormal numbers for 0, and give 0 in place of them. That is documented for Ascend 950 (pages
    // "Exp" and "Ln"). The guide from 2201 to 3510 calls it a change, so an A2 should keep them. Kernels must not care.
    bool flush_subnormals = false;
    bool saturate_float = false;            // ai_core: FP32 results saturate too; no page says whether they do
    bool strict_vector = true;              // V after V needs PipeBarrier<PIPE_V>, although the compiler can insert it
    bool asc_reserved_ubuf = true;  // false: --cce-disable-asc-reserved-ubuf, 8 KiB more UB and no Select
    Deviation deviation = Deviation::none;
    uint32_t switch_one_in = 8;     // another core may run at any call, with this chance
    ChipFacts chip;
};

}  // namespace twin
