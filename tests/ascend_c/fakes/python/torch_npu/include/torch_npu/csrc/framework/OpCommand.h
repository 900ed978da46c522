// The calls of torch_npu's task queue that the binding makes; a task runs at once.
#pragma once

#include <functional>
#include <string>

namespace at_npu::native {

class OpCommand {
public:
    OpCommand& Name(const std::string&) { return *this; }
    OpCommand& SetCustomHandler(std::function<int()> task)
    {
        task_ = std::move(task);
        return *this;
    }
    void Run() { task_(); }

private:
    std::function<int()> task_;
};

}  // namespace at_npu::native
