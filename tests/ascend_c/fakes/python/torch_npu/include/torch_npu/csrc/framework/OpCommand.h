// The calls of torch_npu's task queue that the binding makes; a task runs at once. With
// FAKE_DEVIATION=stream_order it runs too late for whoever reads its result: here never.
#pragma once

#include <cstdlib>
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
    void Run()
    {
        const char* deviation = std::getenv("FAKE_DEVIATION");
        if (deviation == nullptr || std::string(deviation) != "stream_order") task_();
    }

private:
    std::function<int()> task_;
};

}  // namespace at_npu::native
