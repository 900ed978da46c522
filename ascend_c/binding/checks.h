// What the operators check of tensors and of the chip, and how they hand tensors on.
#pragma once

#include <ATen/core/Tensor.h>
#include <acl/acl.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "../tiling/plan.h"

namespace pasa {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---- checks

inline void CheckKind(const char* name, const Tensor& x, const Tensor& first, at::ScalarType dtype,
                      at::IntArrayRef shape)
{
    TORCH_CHECK_TYPE(x.scalar_type() == dtype, name, " is ", x.scalar_type(), ", expected ", dtype);
    TORCH_CHECK_VALUE(x.device() == first.device(), name, " is on ", x.device(), " but the first tensor is on ",
                      first.device());
    TORCH_CHECK_VALUE(x.sizes() == shape, name, " has shape ", x.sizes(), ", expected ", shape);
}

inline void CheckTensor(const char* name, const Tensor& x, const Tensor& first, at::ScalarType dtype,
                        at::IntArrayRef shape)
{
    CheckKind(name, x, first, dtype, shape);
    TORCH_CHECK_VALUE(x.is_contiguous(), name, " is not contiguous");
}

// The number of elements along an axis, as the kernels count: with 32 bits.
inline uint32_t Count(const char* name, const Tensor& x, int64_t axis)
{
    TORCH_CHECK_VALUE(x.dim() == 4, name, " has ", x.dim(), " dimensions ", x.sizes(), ", expected 4");
    const int64_t size = x.size(axis);
    TORCH_CHECK_VALUE(size <= std::numeric_limits<int32_t>::max(), name, " has ", size, " elements along axis ", axis);
    return static_cast<uint32_t>(size);
}

inline int64_t Blocks(int64_t keys) { return DivideUp<int64_t>(keys, kBlockKeys); }

// ---- the chip

// Memory sizes follow from the chip's name. Core numbers come from the runtime, which may be configured to use fewer.
inline std::string SocName()
{
    const char* name = aclrtGetSocName();
    return name == nullptr ? "" : name;
}

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
    return "no kernel was written for this chip, '" + SocName() + "': only for Ascend910B1 to B4";
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

inline void* Pointer(const Tensor& x) { return x.data_ptr(); }
inline void* Pointer(const OptionalTensor& x) { return x ? x->data_ptr() : nullptr; }

inline at::ScalarType OutputType(bool to_bf16) { return to_bf16 ? at::kBFloat16 : at::kHalf; }

}  // namespace pasa
