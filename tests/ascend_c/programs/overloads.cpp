// Every overload that the twin has, called once with the vendor's argument order. Compiled, never run.
#include "kernel_operator.h"

using namespace AscendC;

template <typename T>
void element_wise(LocalTensor<T> z, LocalTensor<T> x, LocalTensor<T> y, T s, uint64_t mask[2])
{
    const UnaryRepeatParams u{1, 1, 8, 8};
    const BinaryRepeatParams b{1, 1, 1, 8, 8, 8};
#define UNARY(Name)                    \
    Name(z, x, 64);                    \
    Name(z, x, uint64_t(64), 2, u);    \
    Name(z, x, mask, 2, {1, 1, 8, 8}); \
    Name<T, false>(z, x, MASK_PLACEHOLDER, 1, u)
#define BINARY(Name)                            \
    Name(z, x, y, 64);                          \
    Name(z, x, y, uint64_t(64), 2, b);          \
    Name(z, x, y, mask, 2, {1, 1, 1, 8, 8, 8}); \
    Name<T, false>(z, x, y, MASK_PLACEHOLDER, 1, b)
#define SCALAR(Name)                   \
    Name(z, x, s, 64);                 \
    Name<T, false>(z, x, s, 1);        \
    Name(z, x, s, uint64_t(64), 2, u); \
    Name(z, x, s, mask, 2, u)
    UNARY(Exp);
    UNARY(Ln);
    UNARY(Reciprocal);
    UNARY(Abs);
    BINARY(Add);
    BINARY(Sub);
    BINARY(Mul);
    BINARY(Div);
    BINARY(Max);
    BINARY(Min);
    SCALAR(Adds);
    SCALAR(Muls);
    SCALAR(Maxs);
    SCALAR(Mins);
    Duplicate(z, s, 64);
    Duplicate(z, s, uint64_t(64), 2, 1, 8);
    Duplicate(z, s, mask, 2, 1, 8);
    CreateVecIndex(z, s, 64u);
    CreateVecIndex(z, s, uint64_t(64), 2, 1, 8);
    CreateVecIndex(z, s, mask, 2, 1, 8);
    Brcb(z, x, 8, {1, 8});
}

void integers(LocalTensor<int32_t> i, LocalTensor<uint32_t> u, LocalTensor<uint16_t> w, uint64_t mask[2])
{
    const UnaryRepeatParams up{1, 1, 8, 8};
    const BinaryRepeatParams b{1, 1, 1, 8, 8, 8};
    ShiftLeft(u, u, 3u, 64);
    ShiftLeft<uint32_t, false>(u, u, 3u, 1);
    ShiftRight(u, u, 3u, uint64_t(64), 2, up);
    ShiftRight(u, u, 3u, mask, 2, up);
    And(w, w, w, uint64_t(128), 2, b);
    And(w, w, w, mask, 2, b);
    And<uint16_t, false>(w, w, w, MASK_PLACEHOLDER, 1, b);
    Add(i, i, i, uint64_t(64), 2, b);
    Mul(i, i, i, mask, 2, b);
    Mul(i, i, i, 64);
    CreateVecIndex(i, 1, 64u);
    Adds(i, i, 1, 64);
    Muls(i, i, 1, uint64_t(64), 2, up);
}

template <typename T>
void chosen_and_reduced(LocalTensor<T> z, LocalTensor<T> x, LocalTensor<T> y, T s, uint64_t mask[2],
                        LocalTensor<uint8_t> bits)
{
    const UnaryRepeatParams u;
    const BinaryRepeatParams b;
    Compare(bits, x, y, CMPMODE::LT, 128);
    Compare(bits, x, y, CMPMODE::LT, uint64_t(64), 2, b);
    Compare(bits, x, y, CMPMODE::LT, mask, 2, b);
    Compares(bits, x, s, CMPMODE::GE, uint64_t(64), 2, u);
    Compares<T, uint8_t>(bits, x, s, CMPMODE::GE, mask, 2, u);
    Compares(bits, x, s, CMPMODE::NE, 128);
    Select(z, bits, x, y, SELMODE::VSEL_TENSOR_TENSOR_MODE, 64);
    Select(z, bits, x, y, SELMODE::VSEL_CMPMASK_SPR, uint64_t(64), 2, b);
    Select(z, bits, x, y, SELMODE::VSEL_TENSOR_TENSOR_MODE, mask, 2, b);
    Select(z, bits, x, s, SELMODE::VSEL_TENSOR_SCALAR_MODE, 64);
    Select(z, bits, x, s, SELMODE::VSEL_TENSOR_SCALAR_MODE, uint64_t(64), 2, b);
    Select(z, bits, x, s, SELMODE::VSEL_TENSOR_SCALAR_MODE, mask, 2, b);
    const uint64_t bit_mask[2] = {~0ull, ~0ull};
    ReduceRepeat<ReduceType::MAX>(z, x, 64, 2, 1, 1, 8);
    ReduceRepeat<ReduceType::MAX, T, T>(z, x, 64, 2, 1, 1, 8, ReduceOrder::ORDER_ONLY_INDEX);
    ReduceRepeat<ReduceType::SUM>(z, x, bit_mask, 2, 1, 1, 8);
    ReduceRepeat<ReduceType::MIN, T, T, false>(z, x, MASK_PLACEHOLDER, 2, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
    ReduceDataBlock<ReduceType::MIN, T, T>(z, x, mask, 2, 1, 1, 8);
    ReducePairElem<ReduceType::SUM, T, T>(z, x, 64, 2, 1, 1, 8);
}

void conversions(LocalTensor<half> h, LocalTensor<float> f, LocalTensor<bfloat16_t> b, LocalTensor<int32_t> i,
                 uint64_t mask[2])
{
    Cast(f, h, RoundMode::CAST_NONE, 64);
    Cast(h, f, RoundMode::CAST_RINT, uint64_t(64), 2, {1, 1, 4, 8});
    Cast(b, f, RoundMode::CAST_RINT, mask, 2, {1, 1, 4, 8});
    Cast(f, b, RoundMode::CAST_NONE, 64);
    Cast(i, f, RoundMode::CAST_FLOOR, 64);
    Cast(f, f, RoundMode::CAST_RINT, 64);
    Cast(f, i, RoundMode::CAST_RINT, 64);
    const bfloat16_t scalar = Cast(1.5f);
    static_cast<void>(Cast(scalar));
    static_cast<void>(Cast<float, half, RoundMode::CAST_ODD>(1.5f));
}

void copies(LocalTensor<half> l, GlobalTensor<half> g)
{
    DataCopy(l, g, 64);
    DataCopy(g, l, 64);
    DataCopy(l, l, 64);
    DataCopy(l, g, DataCopyParams(1, 4, 0, 0));
    DataCopy(g, l, {1, 4, 0, 0});
    DataCopy(l, l, DataCopyParams());
    DataCopy(l, g, Nd2NzParams());
    DataCopyPad(l, g, DataCopyExtParams(1, 20, 0, 0, 0), DataCopyPadExtParams<half>(true, 0, 6, half(0)));
    DataCopyPad(g, l, DataCopyExtParams(1, 20, 0, 0, 0));
    LoadData(l, l, LoadData2DParams(0, 1, 1, 0, 0, false, 0));
}

void cube(LocalTensor<half> h, LocalTensor<bfloat16_t> b, LocalTensor<float> f, GlobalTensor<half> gh,
          GlobalTensor<bfloat16_t> gb, GlobalTensor<float> gf)
{
    Mmad(f, h, h, MmadParams(16, 16, 16, 0, false, true));
    Mmad(f, b, b, MmadParams());
    const FixpipeParamsV220 p(16, 16, 16, 16, false, QuantMode_t::F322F16, 0, 1, 0, 0, 0);
    Fixpipe<half, float, CFG_ROW_MAJOR>(gh, f, p);
    Fixpipe<half, float, CFG_NZ>(gh, f, p);
    Fixpipe<bfloat16_t, float>(gb, f, p);
    Fixpipe(gf, f, p);
    Fixpipe<half, float, CFG_NZ>(h, f, p);
}

extern "C" __global__ __aicore__ void entry(GM_ADDR x, GM_ADDR z)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    TPipe pipe;
    TQue<QuePosition::VECIN, 2> in;
    TBuf<> buffer;
    if ASCEND_IS_AIV {
        pipe.InitBuffer(in, 2, 1024);
        pipe.InitBuffer(buffer, 1024);
        LocalTensor<float> t = buffer.GetWithOffset<float>(16, 32);
        t.SetValue(0, 1);
        in.AllocTensor(t);
        in.EnQue(t);
        in.DeQue(t);
        in.FreeTensor(t);
    }
    LocalTensor<uint16_t> bits;
    And(bits, bits, bits, 16);
    GlobalTensor<half> g;
    DataCacheCleanAndInvalid<half, CacheLine::ENTIRE_DATA_CACHE, DcciDst::CACHELINE_OUT>(g);
    g.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(x), 16);
    g.SetGlobalBuffer((__gm__ half*)z);
    const TEventID id = pipe.FetchEventID(HardEvent::MTE2_S);
    SetFlag<HardEvent::MTE2_S>(id);
    WaitFlag<HardEvent::MTE2_S>(id);
    static_cast<void>(pipe.FetchEventID<HardEvent::S_MTE2>());
    static_cast<void>(GetTPipePtr()->AllocEventID<HardEvent::S_MTE2>());
    PipeBarrier<PIPE_ALL>();
    CrossCoreSetFlag<2, PIPE_FIX>(0);
    CrossCoreWaitFlag(0);
    CrossCoreWaitFlag<2, PIPE_MTE2>(0);
    SyncAll();
    SyncAll<false>();
    SetVectorMask<half>(64);
    SetVectorMask<half, MaskMode::COUNTER>(200);
    SetVectorMask<half, MaskMode::NORMAL>(~0ull, ~0ull);
    SetMaskCount();
    SetMaskNorm();
    ResetMask();
    SetSaturationFlag<SaturationMode::FLOAT>(!GetSaturationFlag<SaturationMode::FLOAT>());
    static_cast<void>(GetBlockIdx() + GetBlockNum() + GetSubBlockIdx() + GetSubBlockNum());
}

template void element_wise(LocalTensor<half>, LocalTensor<half>, LocalTensor<half>, half, uint64_t[2]);
template void element_wise(LocalTensor<float>, LocalTensor<float>, LocalTensor<float>, float, uint64_t[2]);
template void chosen_and_reduced(LocalTensor<half>, LocalTensor<half>, LocalTensor<half>, half, uint64_t[2],
                                 LocalTensor<uint8_t>);
template void chosen_and_reduced(LocalTensor<float>, LocalTensor<float>, LocalTensor<float>, float, uint64_t[2],
                                 LocalTensor<uint8_t>);
