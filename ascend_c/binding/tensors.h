// What the operators of both chips share: checks of tensors, their pointers, and the chip's name.
#pragma once

#include <ATen/core/Tensor.h>
#include <acl/acl.h>

#include <limits>
#include <optional>
#include <string>

#include "../tiling/tiling.h"

namespace pasa {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

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

inline void* Pointer(const Tensor& x) { return x.data_ptr(); }
inline void* Pointer(const OptionalTensor& x) { return x ? x->data_ptr() : nullptr; }

// The name of this machine's chip, such as Ascend910B3; empty if the runtime has none.
inline std::string SocName()
{
    const char* name = aclrtGetSocName();
    return name == nullptr ? "" : name;
}

}  // namespace pasa
