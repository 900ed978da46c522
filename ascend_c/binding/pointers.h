// Device memory of the launches on both chips: plain types, which CANN's compiler and the host's pass to each other.
#pragma once

namespace pasa {

// Null for an operand that a call or a chip does not have. kernel/arguments.h describes the operands.
struct AttentionPointers {
    void* q;
    void* keys;
    void* v;
    void* anchors;
    void* units;
    void* lengths;
    void* starts;
    void* sinks;
    void* mask;
    void* visits;
    void* out;
    void* lse;
    void* largest;
    void* counts;
    void* workspace;
};

struct DecodePointers {
    void* q;
    void* k;
    void* v;
    void* table;
    void* lengths;
    void* starts;
    void* sinks;
    void* out;
    void* lse;
    void* workspace;
};

// kernel/arguments.h says what each holds.
struct ShiftPointers {
    void* k;
    void* lengths;
    void* starts;
    void* matrix;
    void* keys;
    void* anchors;
    void* units;
};

}  // namespace pasa
