// What the operators for Atlas A2 check of the chip, and the dtype of their outputs.
#pragma once

#include <algorithm>
#include <string>

#include "../tiling/plan.h"
#include "tensors.h"

namespace pasa {

// Memory sizes follow from the chip's name. Core numbers come from the runtime, which may be configured to use fewer.
inline const Chip* FindChip()
{
    const auto known = [name = SocName()](const Chip& c) { return name.rfind(c.name, 0) == 0; };
    const Chip* found = std::find_if(std::begin(kChips), std::end(kChips), known);
    return found == std::end(kChips) ? nullptr : found;
}

// Why the kernels cannot run on this machine's chip; empty where they can.
inline std::string ChipError()
{
    if (FindChip() != nullptr) return "";
    if (SocName().rfind(kChip310P, 0) == 0) {
        return "the library was built for Atlas A2, and this chip is an " + SocName() +
               ": run `pasa build-ascend` with SOC_VERSION=" + SocName();
    }
    return "no kernel was written for this chip, '" + SocName() + "': only for Ascend910B1 to B4 and the Ascend 310P";
}

inline Chip ChipOf(const Tensor& x)
{
    TORCH_CHECK_NOT_IMPLEMENTED(FindChip() != nullptr, ChipError());
    Chip chip = *FindChip();
    int64_t cube = 0, vector = 0;
    const auto device = static_cast<uint32_t>(std::max<int64_t>(x.get_device(), 0));
    TORCH_CHECK(aclrtGetDeviceInfo(device, ACL_DEV_ATTR_CUBE_CORE_NUM, &cube) == ACL_SUCCESS &&
                    aclrtGetDeviceInfo(device, ACL_DEV_ATTR_VECTOR_CORE_NUM, &vector) == ACL_SUCCESS,
                "aclrtGetDeviceInfo does not tell how many cores device ", device, " has");
    chip.cube_cores = static_cast<uint32_t>(std::min(cube, vector / 2));
    chip.vector_cores = static_cast<uint32_t>(vector);
    return chip;
}

inline at::ScalarType OutputType(bool to_bf16) { return to_bf16 ? at::kBFloat16 : at::kHalf; }

}  // namespace pasa
