// The calls of torch_npu's streams that the binding makes.
#pragma once

namespace c10_npu {

struct NPUStream {
    void* stream(bool) const { return nullptr; }
};

inline NPUStream getCurrentNPUStream() { return {}; }

}  // namespace c10_npu
