// How the operators check where packed sequences start.
#pragma once

#include "tensors.h"

namespace pasa {

// Check cumulative lengths of packed rows. Where they are in host memory, values are checked too; those of a device
// would have to be waited for. There the kernels read no row that does not exist, whatever they say.
inline void CheckCumulative(const char* name, const Tensor& starts, int64_t rows)
{
    if (!starts.device().is_cpu()) return;
    const int32_t* at = starts.const_data_ptr<int32_t>();
    const int64_t last = starts.numel() - 1;
    TORCH_CHECK_VALUE(at[0] == 0, name, "[0]=", at[0], " must be 0: the first sequence begins with the first row");
    for (int64_t i = 1; i <= last; ++i) {
        TORCH_CHECK_VALUE(at[i] >= at[i - 1], name, "[", i, "]=", at[i], " is below ", name, "[", i - 1, "]=",
                          at[i - 1], ": cumulative lengths do not decrease");
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
