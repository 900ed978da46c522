// torch.ops.pasa.npu_310p_probe_*: the same on an Ascend 310P, for `pasa check-device --npu`.
#include <torch/library.h>

#include "probe_calls.h"

namespace pasa {

TORCH_LIBRARY_FRAGMENT(pasa, m)
{
    m.def("npu_310p_probe_chip", [](int64_t device) {
        return ProbeChip(device, {ACL_DEV_ATTR_AICORE_CORE_NUM});
    });
    m.def("npu_310p_probe_vector(Tensor x, Tensor y, int probe, bool saturate) -> Tensor");
    m.def("npu_310p_probe_product(Tensor a, Tensor b, Tensor stale) -> Tensor");
}

TORCH_LIBRARY_IMPL(pasa, PASA_DEVICE, m)
{
    m.impl("npu_310p_probe_vector", ProbeVector);
    m.impl("npu_310p_probe_product", ProbeProduct);
}

}  // namespace pasa
