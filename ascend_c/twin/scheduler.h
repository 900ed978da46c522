// Cores as fibers of one thread, scheduled by a seed: every interleaving of AIC and AIV is reproducible. A fiber gives
// way at waits and, by chance, at any call. A fault stops the launch; all other fibers are unwound by an exception.
#pragma once

#include <ucontext.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define TWIN_FIBER_LEAVE(saved, stack, size) __sanitizer_start_switch_fiber(saved, stack, size)
#define TWIN_FIBER_ENTER(saved, stack, size) __sanitizer_finish_switch_fiber(saved, stack, size)
#else
#define TWIN_FIBER_LEAVE(saved, stack, size) static_cast<void>(0)
#define TWIN_FIBER_ENTER(saved, stack, size) static_cast<void>(0)
#endif

namespace twin {

class Scheduler {
public:
    Scheduler(Launch& owner, std::function<void()> kernel)
        : launch_(owner),
          kernel_(std::move(kernel)),
          rng_(owner.options.seed)
    {
        for (auto& c : launch_.cores) fibers_.push_back(std::make_unique<Fiber>(c.get()));
    }

    // Runs all cores to their ends. Returns false, with the fault, when one of them broke a rule.
    bool run(Fault& fault)
    {
        active() = this;
        bool clean = true;
        while (clean) {
            std::vector<Fiber*> ready;
            bool unfinished = false;
            for (auto& f : fibers_) {
                unfinished |= !f->finished;
                if (!f->finished && (f->ready == nullptr || (*f->ready)())) ready.push_back(f.get());
            }
            if (!unfinished) break;
            if (ready.empty()) {
                fault = deadlock();
                clean = false;
                break;
            }
            resume(*ready[rng_() % ready.size()]);
            if (failed_) {
                fault = fault_;
                clean = false;
            }
        }
        if (!clean) abandon();
        active() = nullptr;
        return clean;
    }

    // Called in a fiber: let another core run, by chance.
    static void maybe_switch()
    {
        Core& c = core();
        if (active() == nullptr || launch->abandoning || c.options.switch_one_in == 0) return;
        if (c.rng() % c.options.switch_one_in == 0) active()->leave();
    }

    // Called in a fiber: go on only when `ready` holds. `reason` says what for, in a deadlock report.
    static void wait_until(const std::function<bool()>& ready, const std::string& reason)
    {
        if (ready()) return;
        Fiber& f = *active()->running_;
        f.ready = &ready;
        f.reason = reason;
        active()->leave();
        f.ready = nullptr;
    }

private:
    static constexpr size_t kStack = 512 * kKiB;

    struct Fiber {
        explicit Fiber(Core* c) : core(c), stack(new char[kStack]) {}
        Core* core;
        std::unique_ptr<char[]> stack;
        ucontext_t context{};
        bool started = false;
        bool finished = false;
        const std::function<bool()>* ready = nullptr;
        std::string reason;
        void* fake_stack = nullptr;
    };

    static Scheduler*& active()
    {
        static Scheduler* scheduler = nullptr;
        return scheduler;
    }

    static void entry()
    {
        Scheduler& s = *active();
        TWIN_FIBER_ENTER(nullptr, &s.main_stack_, &s.main_stack_size_);
        s.body();
        s.running_->finished = true;
        TWIN_FIBER_LEAVE(nullptr, s.main_stack_, s.main_stack_size_);
        swapcontext(&s.running_->context, &s.main_);
    }

    void body()
    {
        try {
            kernel_();
        } catch (const FaultError& e) {
            failed_ = true;
            fault_ = e.fault;
        } catch (const Abandoned&) {
        } catch (const std::exception& e) {
            failed_ = true;
            fault_ = Fault{FaultKind::program, launch_.kernel, current->name(), "S", "kernel", "", 0, "", e.what()};
        }
    }

    void resume(Fiber& f)
    {
        running_ = &f;
        current = f.core;
        if (!f.started) {
            f.started = true;
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.get();
            f.context.uc_stack.ss_size = kStack;
            f.context.uc_link = nullptr;
            makecontext(&f.context, &Scheduler::entry, 0);
        }
        TWIN_FIBER_LEAVE(&main_fake_stack_, f.stack.get(), kStack);
        swapcontext(&main_, &f.context);
        TWIN_FIBER_ENTER(main_fake_stack_, nullptr, nullptr);
        current = nullptr;
        running_ = nullptr;
    }

    void leave()
    {
        Fiber& f = *running_;
        TWIN_FIBER_LEAVE(&f.fake_stack, main_stack_, main_stack_size_);
        swapcontext(&f.context, &main_);
        TWIN_FIBER_ENTER(f.fake_stack, &main_stack_, &main_stack_size_);
        if (launch_.abandoning) throw Abandoned{};
    }

    Fault deadlock()
    {
        std::string all;
        Fiber* first = nullptr;
        for (auto& f : fibers_) {
            if (f->finished) continue;
            if (first == nullptr) first = f.get();
            all += (all.empty() ? "" : "; ") + f->core->name() + " waits for " + f->reason;
        }
        Core& c = *first->core;
        return Fault{
            FaultKind::deadlock, launch_.kernel, c.name(), name_of(c.pipe), c.call, c.here.file, c.here.line, "", all};
    }

    void abandon()
    {
        launch_.abandoning = true;
        for (auto& f : fibers_) {
            if (f->started && !f->finished) resume(*f);
        }
    }

    Launch& launch_;
    std::function<void()> kernel_;
    std::mt19937_64 rng_;
    std::vector<std::unique_ptr<Fiber>> fibers_;
    Fiber* running_ = nullptr;
    ucontext_t main_{};
    const void* main_stack_ = nullptr;
    size_t main_stack_size_ = 0;
    void* main_fake_stack_ = nullptr;
    bool failed_ = false;
    Fault fault_;
};

}  // namespace twin
