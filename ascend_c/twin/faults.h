// Faults: what the twin says when a kernel breaks a rule, and where in the kernel's source it did.
#pragma once

#include <cstdint>
#include <string>

namespace twin {

// The place of an API call. Every API function ends with `Here here = Here::now()`, so kernel sources need no change.
struct Here {
    const char* file = "";
    int line = 0;

    static constexpr Here now(const char* file = __builtin_FILE(), int line = __builtin_LINE())
    {
        return Here{file, line};
    }
};

enum class FaultKind {
    capacity,       // a memory is full
    position,       // the operand lies in a memory that this call does not reach
    core,           // a vector call on the cube core, or the reverse
    alignment,      // 32, 64, 512 or 1024 bytes
    range,          // a field is beyond its documented range
    bounds,         // outside the tensor's own buffer, or outside the GM allocation
    type,           // a combination of data types or modes that the device does not have
    race,           // two accesses, one of them a write, without an order between them
    flag,           // SetFlag twice, or a flag left set at the end
    event_id,       // an event id out of range, not allocated, or owned by a queue
    queue,          // TQue used against its state machine
    cross_core,     // cross-core counters: overflow, left over, wrong pipe or mode
    deadlock,       // nobody can go on
    uninitialised,  // a read of memory that nobody has written
    overlap,        // source and destination of one vector call overlap in a way the device does not define
    nan,            // NaN fed into Mmad
    guard,          // host memory beside a GM allocation was overwritten
    program,        // the program uses the twin in a way it does not emulate
};

inline const char* name_of(FaultKind kind)
{
    static const char* const names[] = {"capacity", "position",      "core",    "alignment", "range", "bounds",
                                        "type",     "race",          "flag",    "event_id",  "queue", "cross_core",
                                        "deadlock", "uninitialised", "overlap", "nan",       "guard", "program"};
    return names[static_cast<int>(kind)];
}

struct Fault {
    FaultKind kind = FaultKind::program;
    std::string kernel;
    std::string core;  // "aic 0", "aiv 3"
    std::string pipe;  // "MTE2"
    std::string call;  // "DataCopy"
    std::string file;
    int line = 0;
    std::string buffer;  // "UB+0x400 (VECIN)", "GM workspace+128"
    std::string sentence;

    std::string text() const
    {
        std::string out = std::string(name_of(kind)) + " fault in " + kernel + ", " + core + ", pipe " + pipe + ": " +
                          call + " at " + file + ":" + std::to_string(line);
        if (!buffer.empty()) out += ", " + buffer;
        return out + ": " + sentence;
    }
};

// Thrown by the faulting fiber. The scheduler catches it at the fiber's root and unwinds all others.
struct FaultError {
    Fault fault;
};

// Thrown in every other fiber when the launch is given up, so that their stacks are unwound and nothing leaks.
struct Abandoned {};

inline std::string quoted(const std::string& text)
{
    std::string out = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') out += '\\';
        if (c == '\n') {
            out += "\\n";
        } else {
            out += c;
        }
    }
    return out + '"';
}

inline std::string json(const Fault& f)
{
    return "{\"kind\": " + quoted(name_of(f.kind)) + ", \"kernel\": " + quoted(f.kernel) +
           ", \"core\": " + quoted(f.core) + ", \"pipe\": " + quoted(f.pipe) + ", \"call\": " + quoted(f.call) +
           ", \"file\": " + quoted(f.file) + ", \"line\": " + std::to_string(f.line) +
           ", \"buffer\": " + quoted(f.buffer) + ", \"sentence\": " + quoted(f.sentence) + "}";
}

}  // namespace twin
