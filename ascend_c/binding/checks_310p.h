// What the operators for the Ascend 310P check of the chip.
#pragma once

#include <algorithm>
#include <string>

#include "../tiling/plan.h"
#include "tensors.h"

namespace pasa {

// Why the kernels cannot run on this machine's chip; empty where they can.
inline std::string ChipError()
{
    if (SocName().rfind(kChip310P, 0) == 0) return "";
    return "the library was built for the Ascend 310P, and this chip is '" + SocName() +
           "': run `pasa build-ascend` with SOC_VERSION=" + SocName();
}

inline uint32_t CoresOf(const Tensor& x)
{
    const std::string error = ChipError();
    TORCH_CHECK_NOT_IMPLEMENTED(error.empty(), error);
    int64_t cores = 0;
    const auto device = static_cast<uint32_t>(std::max<int64_t>(x.get_device(), 0));
    TORCH_CHECK(aclrtGetDeviceInfo(device, ACL_DEV_ATTR_AICORE_CORE_NUM, &cores) == ACL_SUCCESS,
                "aclrtGetDeviceInfo does not tell how many AI cores device ", device, " has");
    return static_cast<uint32_t>(cores);
}

}  // namespace pasa
