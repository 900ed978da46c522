// K' for the exact recovery on the vector cores of an Atlas A2, row by row.
#pragma once

#include "overflow_mode.h"
#include "shift_exact.h"

namespace pasa {

// K' as the keys lie: row by row.
struct RowKeys {
    static __aicore__ inline void ToIntegers(const RowMath::Row& row, uint32_t count)
    {
        AscendC::Cast(row, row, AscendC::RoundMode::CAST_RINT, count, 1, AscendC::UnaryRepeatParams(1, 1, 8, 8));
    }
    static __aicore__ inline uint64_t Place(const ShiftTiling& t, uint32_t head, uint32_t, uint32_t row)
    {
        return (static_cast<uint64_t>(head) * t.keys + row) * t.dim;
    }
    // Rows behind the last key.
    static __aicore__ inline void FillUp(const AscendC::LocalTensor<half>&, uint32_t, uint32_t) {}
    static __aicore__ inline void Store(const AscendC::GlobalTensor<half>& to, const AscendC::LocalTensor<half>& keys,
                                        uint32_t dim, uint32_t count)
    {
        AscendC::DataCopy(to, keys, count * dim);
    }
};

// On vector cores alone, all at once: SyncAll waits for every one of them.
__aicore__ inline void ShiftExact(const ShiftArguments& arguments, const ShiftTiling& tiling)
{
    const OverflowMode mode(tiling.saturates != 0);
    AscendC::TPipe pipe;
    ShiftExactly<RowKeys> shift(arguments, tiling, pipe);
    shift.MakeAnchors();
    AscendC::SyncAll();
    shift.MakeFrames();
}

}  // namespace pasa
