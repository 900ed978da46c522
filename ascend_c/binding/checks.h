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

// Check cumulative lengths of packed rows. Where they are in host memory, values are checked too; those of a device would
// have to be waited for. There the kernels read no row that does not exist, whatever they say.
inline void CheckCumulative(const char* name, const Tensor& starts, int64_t rows)
{
    if (!starts.device().is_cpu()) return;
    const int32_t* at = starts.const_data_ptr<int32_t>();
    const int64_t last = starts.numel() - 1;
    TORCH_CHECK_VALUE(at[0] == 0, name, "[0]=", at[0], " must be 0: the first sequence begins with the first row");
    for (int64_t i = 1; i <= last; ++i) {
        TORCH_CHECK_VALUE(at[i] >= at[i - 1], name, "[", i, "]=", at[i], " is below ", name, "[", i - 1, "]=", at[i - 1],
                          ": cumulative lengths do not decrease");
    }
    TORCH_CHECK_VALUE(at[last] == rows, name, "[", last, "]=", at[last], " must be ", rows,
                      ": the last sequence ends with the last row");
}

// Return the number of sequences of (2, sequences + 1) first rows of queries and of keys.
inline uint32_t ReadStarts(const Tensor& starts, const Tensor& q, int64_t rows, int64_t keys)
{
    TORCH_CHECK_VALUE(starts.dim() == 2 && starts.size(1) > 1, "starts has shape ", starts.sizes(),
                      ", expected [2, sequences + 1]");
    CheckTensor("starts", starts, q, at::kInt, {2, starts.size(1)});
    CheckCumulative("starts[0]", starts[0], rows);
    CheckCumulative("starts[1]", starts[1], keys);
    return static_cast<uint32_t>(starts.size(1) - 1);
}

}  // namespace pasa
