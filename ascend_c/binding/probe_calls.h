// What the probes of both chips share: checks and launches.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <acl/acl.h>
#include <c10/core/DeviceGuard.h>

#include <string>

#include "enqueue.h"
#include "probes.h"

namespace pasa {

using at::Tensor;

constexpr int64_t kProbe = 4096, kRepeat = 64, kTile = 128, kFractalSide = 16;  // of vector_probes.h and multiply.h

// `x` and `y` hold as many numbers, whole repeats of them.
inline Tensor ProbeVector(const Tensor& x, const Tensor& y, int64_t probe, bool saturate)
{
    TORCH_CHECK_VALUE(x.numel() > 0 && x.numel() <= kProbe && x.numel() % kRepeat == 0, "x has ", x.numel(),
                      " numbers, expected a multiple of ", kRepeat, " up to ", kProbe);
    TORCH_CHECK_VALUE(x.sizes() == y.sizes() && x.element_size() == 4 && y.element_size() == 4 && x.is_contiguous() &&
                          y.is_contiguous() && x.device() == y.device(),
                      "x and y must be contiguous, of one shape and device, and hold four bytes a number");
    const c10::DeviceGuard guard(x.device());
    Tensor z = at::empty(x.sizes(), x.options());
    const VectorProbePointers given{x.data_ptr(), y.data_ptr(), z.data_ptr()};
    const auto count = static_cast<uint32_t>(x.numel()), number = static_cast<uint32_t>(probe);
    Enqueue("pasa_probe_vector",
            [=](void* stream) { LaunchVectorProbe(given, number, count, saturate, stream); });
    return z;
}

// (3, 128, 128), of which the first rows and columns are the products.
inline Tensor ProbeProduct(const Tensor& a, const Tensor& b, const Tensor& stale)
{
    for (const Tensor& each : {a, b, stale}) {
        TORCH_CHECK_VALUE(each.dim() == 2 && each.is_contiguous() && each.scalar_type() == at::kHalf &&
                              each.size(0) > 1 && each.size(0) <= kTile && each.size(1) == a.size(1) &&
                              each.device() == a.device(),
                          "a, b and stale must be contiguous FP16 matrices of 2 to 128 rows, as wide as each other");
    }
    TORCH_CHECK_VALUE(a.size(1) % kFractalSide == 0 && a.size(1) <= kTile && stale.size(0) == kTile, "a has ",
                      a.size(1), " columns, expected a multiple of 16 up to 128; stale needs 128 rows");
    const c10::DeviceGuard guard(a.device());
    Tensor c = at::zeros({3, kTile, kTile}, a.options().dtype(at::kFloat));
    const ProductProbePointers given{a.data_ptr(), b.data_ptr(), stale.data_ptr(), c.data_ptr()};
    const auto m = static_cast<uint32_t>(a.size(0)), n = static_cast<uint32_t>(b.size(0)),
               k = static_cast<uint32_t>(a.size(1));
    Enqueue("pasa_probe_product", [=](void* stream) { LaunchProductProbe(given, m, n, k, stream); });
    return c;
}

// "NAME NUMBER ...": the chip and numbers of its cores, as the runtime says; -1 where it does not.
inline std::string ProbeChip(int64_t device, std::initializer_list<aclrtDevAttr> kinds)
{
    const char* name = aclrtGetSocName();
    std::string text = name == nullptr ? "?" : name;
    for (const aclrtDevAttr kind : kinds) {
        int64_t cores = -1;
        aclrtGetDeviceInfo(static_cast<uint32_t>(device), kind, &cores);
        text += " " + std::to_string(cores);
    }
    return text;
}

}  // namespace pasa
