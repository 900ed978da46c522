// What the snippets of wrong calls share. Every snippet has a correct twin: `bug=0` runs it, `bug=1` runs it with the
// mistake. Files misuse_*.cpp hold them by subject; misuse.cpp runs them.
#pragma once

#include <stdexcept>

#include "harness.h"

using namespace AscendC;

namespace misuse {

struct Snippet {
    twin::Shape shape;
    std::function<void(bool, half*, float*)> run;  // the mistake, a GM input of 4096, a GM output of 4096
    std::function<void(bool, twin::Options&)> options = nullptr;
};

// A place in UB, named for calculating, for copies from GM and for copies to GM.
inline LocalTensor<half> ub(uint32_t address, uint32_t n) { return LocalTensor<half>(TPosition::VECCALC, address, n); }
inline LocalTensor<half> in(uint32_t address, uint32_t n) { return LocalTensor<half>(TPosition::VECIN, address, n); }
inline LocalTensor<half> out(uint32_t address, uint32_t n) { return LocalTensor<half>(TPosition::VECOUT, address, n); }

// Snippets on vector cores start from x = 0..1023 at UB address 0, initialised.
inline LocalTensor<half> some_input()
{
    LocalTensor<half> x = ub(0, 1024);
    Duplicate(x, half(3), 1024);
    PipeBarrier<PIPE_V>();
    return x;
}

inline void cube_operands(LocalTensor<half>& a, LocalTensor<half>& b, half* gx)
{
    LocalTensor<half> l1(TPosition::A1, 0, 4096);
    GlobalTensor<half> x;
    x.SetGlobalBuffer(gx, 4096);
    DataCopy(l1, x, 4096);
    PipeBarrier<PIPE_ALL>();
    a = LocalTensor<half>(TPosition::A2, 0, 4096);
    b = LocalTensor<half>(TPosition::B2, 0, 4096);
    LoadData2DParams p;
    p.repeatTimes = 16;
    p.srcStride = 1;
    LoadData(a, l1, p);
    LoadData(b, l1, p);
    PipeBarrier<PIPE_ALL>();
}

inline MmadParams mmad_params(int m, int n, int k)
{
    MmadParams p;
    p.m = m;
    p.n = n;
    p.k = k;
    return p;
}

inline FixpipeParamsV220 fixpipe_params(int m, int n)
{
    FixpipeParamsV220 p;
    p.mSize = m;
    p.nSize = n;
    p.srcStride = (m + 15) / 16 * 16;
    p.dstStride = n;
    return p;
}

constexpr twin::Shape aiv = twin::Shape::aiv_only, aic = twin::Shape::aic_only, mix = twin::Shape::mix_1_2;

// A product of 16 x 16 in L0C, finished.
inline LocalTensor<float> some_product(half* gx, int unit_flag = 0)
{
    LocalTensor<half> a, b;
    cube_operands(a, b, gx);
    LocalTensor<float> c(TPosition::CO1, 0, 4096);
    MmadParams p = mmad_params(16, 16, 16);
    p.unitFlag = unit_flag;
    Mmad(c, a, b, p);
    if (unit_flag == 0) PipeBarrier<PIPE_ALL>();
    return c;
}

// By name, from all files.
inline std::map<std::string, Snippet>& snippets()
{
    static std::map<std::string, Snippet> all;
    return all;
}

struct Register {
    Register(std::map<std::string, Snippet> more) { snippets().merge(more); }
};

}  // namespace misuse
