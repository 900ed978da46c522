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

// Check the table of visits (B or 1, H or 1, tiles, blocks + 1, words), see kernel/key_blocks.h. Its values are
// checked in host memory alone: those of a device would have to be waited for.
inline void CheckVisits(const Tensor& visits, const Tensor& q, int64_t tiles, int64_t blocks, int64_t words)
{
    TORCH_CHECK_VALUE(visits.dim() == 5, "visits has ", visits.dim(), " dimensions ", visits.sizes(), ", expected 5");
    const auto one_or = [&visits, &q](int64_t axis) { return visits.size(axis) == 1 ? 1 : q.size(axis); };
    CheckTensor("visits", visits, q, at::kLong, {one_or(0), one_or(1), tiles, blocks + 1, words});
    if (!visits.device().is_cpu()) return;
    const int64_t* tile = visits.const_data_ptr<int64_t>();
    for (const int64_t* end = tile + visits.numel(); tile != end; tile += (blocks + 1) * words) {
        TORCH_CHECK_VALUE(tile[0] >= 0 && tile[0] <= blocks, "visits says that a tile visits ", tile[0], " of ", blocks,
                          " blocks of keys");
        for (int64_t i = 1, before = -1; i <= tile[0]; before = tile[i++ * words]) {
            const int64_t block = tile[i * words];
            TORCH_CHECK_VALUE(block > before && block < blocks, "visits has block ", block, " behind block ", before,
                              " of ", blocks, " blocks of keys: they rise");
        }
    }
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
