// The calls of torch_npu's task queue that the binding makes; a task runs at once. FAKE_DEVIATION=stream_order keeps each
// until the next one comes.
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
        static std::function<int()> late;
        const char* deviation = std::getenv("FAKE_DEVIATION");
        if (late) late();
        late = nullptr;
        if (deviation != nullptr && std::string(deviation) == "stream_order") {
            late = task_;
        } else {
            task_();
        }
    }

private:
    std::function<int()> task_;
};

}  // namespace at_npu::native
