// What the programs of the kernels share: numbers and arrays of a call.
#pragma once

#include "harness.h"
#include "tiling/plan.h"

// In a build of mutants, the one to run.
inline void choose_mutant([[maybe_unused]] const harness::Arguments& a)
{
#ifdef PASA_MUTANTS
    pasa_mutant = a.number("mutant");
#endif
}

inline double real(const harness::Arguments& a, const char* key) { return std::atof(a.text(key, "0").c_str()); }

// An array that a program was given or is to give, by name; empty without one.
template <typename T>
inline std::vector<T> given(const harness::Arguments& a, const char* name, bool there = true)
{
    return there ? a.load<T>(name) : std::vector<T>();
}

template <typename T>
inline void* data(std::vector<T>& array)
{
    return array.empty() ? nullptr : array.data();
}

inline pasa::Shape shape_of(const harness::Arguments& a)
{
    const auto number = [&a](const char* key) { return static_cast<uint32_t>(a.number(key)); };
    return {number("batch"), number("heads"), number("kv_heads"), number("rows"), number("keys"), number("dim")};
}
