// torch.ops.pasa.npu_probe_*: what single calls of a device do, for `pasa check-device --npu`.
#include <torch/library.h>

#include "probe_calls.h"

namespace pasa {

TORCH_LIBRARY_FRAGMENT(pasa, m)
{
    m.def("npu_probe_chip", [](int64_t device) {
        return ProbeChip(device, {ACL_DEV_ATTR_CUBE_CORE_NUM, ACL_DEV_ATTR_VECTOR_CORE_NUM});
    });
    m.def("npu_probe_vector(Tensor x, Tensor y, int probe, bool saturate) -> Tensor");
    m.def("npu_probe_product(Tensor a, Tensor b, Tensor stale) -> Tensor");
}

TORCH_LIBRARY_IMPL(pasa, PASA_DEVICE, m)
{
    m.impl("npu_probe_vector", ProbeVector);
    m.impl("npu_probe_product", ProbeProduct);
}

}  // namespace pasa
