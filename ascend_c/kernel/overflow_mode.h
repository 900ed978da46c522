// The overflow mode of a core while a kernel runs.
#pragma once

#include "port.h"

namespace pasa {

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

}  // namespace pasa
