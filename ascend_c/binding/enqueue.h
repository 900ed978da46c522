// Launches of the binding, in the order of torch_npu's operators.
#pragma once

#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

namespace pasa {

// Through torch_npu's own queue: tensors may still wait there to be made, and a launch past it would overtake them.
template <typename Launch>
void Enqueue(const char* name, const Launch& launch)
{
    void* const stream = c10_npu::getCurrentNPUStream().stream(false);
    at_npu::native::OpCommand command;
    command.Name(name);
    command.SetCustomHandler([launch, stream]() -> int {
        launch(stream);
        return 0;
    });
    command.Run();
}

}  // namespace pasa

#ifdef PASA_CPU_TWIN
#define PASA_DEVICE CPU
#else
#define PASA_DEVICE PrivateUse1
#endif
