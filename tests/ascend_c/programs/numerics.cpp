// Correct kernels whose numbers the Python tests compare with numpy.
#include "harness.h"

using namespace AscendC;

namespace {

// One vector call on one vector core: x (and y) from GM, f on n elements, result to GM. Explicit flags throughout.
template <typename D, typename S, typename F>
twin::Report vector_case(const harness::Arguments& arguments, size_t results, F call)
{
    twin::Device device;
    const std::vector<S> hx = arguments.load<S>("x");
    const std::vector<S> hy = arguments.text("y").empty() ? hx : arguments.load<S>("y");
    S* gx = device.input("x", hx);
    S* gy = device.input("y", hy);
    D* gz = device.output<D>("z", results);
    twin::Options options = arguments.options();
    options.shape = twin::Shape::aiv_only;
    const uint32_t n = static_cast<uint32_t>(hx.size());
    const twin::Report report = device.launch("vector", 1, options, [&] {
        SetSaturationFlag<SaturationMode::FLOAT>(arguments.text("overflow") == "saturate");
        TPipe pipe;
        TBuf<TPosition::VECIN> bx, by;
        TBuf<TPosition::VECOUT> bz;
        pipe.InitBuffer(bx, n * sizeof(S));
        pipe.InitBuffer(by, n * sizeof(S));
        pipe.InitBuffer(bz, static_cast<uint32_t>(results * sizeof(D)));
        GlobalTensor<S> x, y;
        GlobalTensor<D> z;
        x.SetGlobalBuffer(gx, n);
        y.SetGlobalBuffer(gy, n);
        z.SetGlobalBuffer(gz, results);
        LocalTensor<S> lx = bx.Get<S>(), ly = by.Get<S>();
        LocalTensor<D> lz = bz.Get<D>();
        const TEventID in = pipe.AllocEventID<HardEvent::MTE2_V>();
        const TEventID out = pipe.AllocEventID<HardEvent::V_MTE3>();
        DataCopy(lx, x, n);
        DataCopy(ly, y, n);
        SetFlag<HardEvent::MTE2_V>(in);
        WaitFlag<HardEvent::MTE2_V>(in);
        call(lz, lx, ly, n);
        SetFlag<HardEvent::V_MTE3>(out);
        WaitFlag<HardEvent::V_MTE3>(out);
        DataCopyExtParams copy;
        copy.blockLen = results * sizeof(D);
        DataCopyPad(z, lz, copy);
        pipe.ReleaseEventID<HardEvent::MTE2_V>(in);
        pipe.ReleaseEventID<HardEvent::V_MTE3>(out);
    });
    arguments.save("z", gz, results);
    return report;
}

template <typename T>
twin::Report arithmetic(const harness::Arguments& arguments)
{
    const std::string op = arguments.text("op");
    const size_t n = arguments.load<T>("x").size();
    return vector_case<T, T>(arguments, n, [&](LocalTensor<T> z, LocalTensor<T> x, LocalTensor<T> y, uint32_t count) {
        const int32_t c = static_cast<int32_t>(count);
        const T s = static_cast<T>(std::atof(arguments.text("scalar", "0").c_str()));
        if (op == "Add") Add(z, x, y, c);
        if (op == "Sub") Sub(z, x, y, c);
        if (op == "Mul") Mul(z, x, y, c);
        if (op == "Max") Max(z, x, y, c);
        if (op == "Min") Min(z, x, y, c);
        if (op == "Adds") Adds(z, x, s, c);
        if (op == "Muls") Muls(z, x, s, c);
        if (op == "Maxs") Maxs(z, x, s, c);
        if (op == "Mins") Mins(z, x, s, c);
        if (op == "Div") Div(z, x, y, c);
        if (op == "Exp") Exp(z, x, c);
        if (op == "Ln") Ln(z, x, c);
        if (op == "Abs") Abs(z, x, c);
        if (op == "Reciprocal") Reciprocal(z, x, c);
        if (op == "AddSub") {  // (x + y) - y: each call rounds
            Add(z, x, y, c);
            PipeBarrier<PIPE_V>();
            Sub(z, z, y, c);
        }
    });
}

}  // namespace

// One call on words: the bits of x, of y, and a number of places or a factor.
TWIN_CASE(word_op)
{
    const std::string op = arguments.text("op");
    const int32_t s = arguments.number("scalar");
    const size_t n = arguments.load<int32_t>("x").size();
    return vector_case<int32_t, int32_t>(
        arguments, n, [&](LocalTensor<int32_t> z, LocalTensor<int32_t> x, LocalTensor<int32_t> y, uint32_t count) {
            const int32_t c = static_cast<int32_t>(count);
            const LocalTensor<uint32_t> to = z.ReinterpretCast<uint32_t>(), from = x.ReinterpretCast<uint32_t>();
            if (op == "Add") Add(z, x, y, c);
            if (op == "Sub") Sub(z, x, y, c);
            if (op == "Mul") Mul(z, x, y, c);
            if (op == "Max") Max(z, x, y, c);
            if (op == "Adds") Adds(z, x, s, c);
            if (op == "Muls") Muls(z, x, s, c);
            if (op == "ShiftLeft") ShiftLeft(to, from, static_cast<uint32_t>(s), c);
            if (op == "ShiftRight") ShiftRight(to, from, static_cast<uint32_t>(s), c);
            if (op == "And") {  // the first block of y serves all repeats
                And(z.ReinterpretCast<uint16_t>(), x.ReinterpretCast<uint16_t>(), y.ReinterpretCast<uint16_t>(),
                    uint64_t(128), c / 64, BinaryRepeatParams(1, 1, 0, 8, 8, 0));
            }
        });
}

TWIN_CASE(half_op) { return arithmetic<half>(arguments); }
TWIN_CASE(float_op) { return arithmetic<float>(arguments); }

TWIN_CASE(cast)
{
    const std::string to = arguments.text("to");
    const RoundMode mode = static_cast<RoundMode>(arguments.number("round"));
    const std::string from = arguments.text("from");
    if (from == "float") {
        const size_t n = arguments.load<float>("x").size();
        const auto as = [&](auto sample) {
            using D = decltype(sample);
            return vector_case<D, float>(
                arguments, n,
                [&](LocalTensor<D> z, LocalTensor<float> x, LocalTensor<float>, uint32_t c) { Cast(z, x, mode, c); });
        };
        if (to == "half") return as(half());
        if (to == "bfloat16") return as(bfloat16_t());
        return as(int32_t());
    }
    const size_t n = arguments.load<half>("x").size();
    return vector_case<float, half>(
        arguments, n,
        [&](LocalTensor<float> z, LocalTensor<half> x, LocalTensor<half>, uint32_t c) { Cast(z, x, mode, c); });
}

namespace {

template <typename T>
twin::Report reductions(const harness::Arguments& arguments)
{
    const std::string op = arguments.text("op");
    const int lanes = 256 / static_cast<int>(sizeof(T));
    const int n = static_cast<int>(arguments.load<T>("x").size());
    const int repeats = n / lanes;
    const int mask = arguments.number("mask", lanes);
    const int per_repeat = op == "PairSum"             ? lanes / 2
                           : op.rfind("Block", 0) == 0 ? 8
                           : op == "RepeatMaxIndex"    ? 2
                                                       : 1;
    return vector_case<T, T>(arguments, static_cast<size_t>(repeats * per_repeat),
                             [&](LocalTensor<T> z, LocalTensor<T> x, LocalTensor<T>, uint32_t) {
                                 Duplicate(z, T(0), repeats * per_repeat);
                                 PipeBarrier<PIPE_V>();
                                 const ReduceOrder value = ReduceOrder::ORDER_ONLY_VALUE;
                                 if (op == "RepeatMax")
                                     ReduceRepeat<ReduceType::MAX>(z, x, mask, repeats, 1, 1, 8, value);
                                 if (op == "RepeatMaxIndex")
                                     ReduceRepeat<ReduceType::MAX>(z, x, mask, repeats, 1, 1, 8);
                                 if (op == "RepeatMin")
                                     ReduceRepeat<ReduceType::MIN>(z, x, mask, repeats, 1, 1, 8, value);
                                 if (op == "RepeatSum") ReduceRepeat<ReduceType::SUM>(z, x, mask, repeats, 1, 1, 8);
                                 if (op == "BlockMax") ReduceDataBlock<ReduceType::MAX>(z, x, mask, repeats, 1, 1, 8);
                                 if (op == "BlockSum") ReduceDataBlock<ReduceType::SUM>(z, x, mask, repeats, 1, 1, 8);
                                 if (op == "PairSum") ReducePairElem<ReduceType::SUM>(z, x, mask, repeats, 1, 1, 8);
                             });
}

}  // namespace

TWIN_CASE(half_reduce) { return reductions<half>(arguments); }
TWIN_CASE(float_reduce) { return reductions<float>(arguments); }

TWIN_CASE(brcb_row_multiply)
{
    // Row broadcast as kernels do it: Brcb of one factor per row, then Mul with block stride 0 and repeat stride 1.
    const int rows = arguments.number("rows");
    return vector_case<half, half>(arguments, static_cast<size_t>(rows) * 128,
                                   [&](LocalTensor<half> z, LocalTensor<half> x, LocalTensor<half> y, uint32_t n) {
                                       LocalTensor<half> wide = z[0];
                                       static_cast<void>(n);
                                       // y holds the factors in its first `rows` elements; blocks for rows 0.. go
                                       // behind them.
                                       LocalTensor<half> blocks = y[static_cast<uint32_t>((rows + 15) / 16 * 16)];
                                       Brcb(blocks, y, (rows + 7) / 8, BrcbRepeatParams(1, 8));
                                       PipeBarrier<PIPE_V>();
                                       Mul(wide, x, blocks, static_cast<uint64_t>(128), rows,
                                           BinaryRepeatParams(1, 1, 0, 8, 8, 1));
                                   });
}

TWIN_CASE(masked_select)
{
    // z = x < y ? x : scalar, and the unused lanes of the last repeat keep what they held.
    const uint32_t n = static_cast<uint32_t>(arguments.load<half>("x").size());
    const std::string op = arguments.text("op");
    return vector_case<half, half>(arguments, n,
                                   [&](LocalTensor<half> z, LocalTensor<half> x, LocalTensor<half> y, uint32_t count) {
                                       TBuf<TPosition::VECCALC> bits;
                                       GetTPipePtr()->InitBuffer(bits, count / 8 + 32);
                                       LocalTensor<uint8_t> chosen = bits.Get<uint8_t>();
                                       if (op == "scalar") Compares(chosen, x, half(0.5f), CMPMODE::GT, count);
                                       else Compare(chosen, x, y, CMPMODE::LT, count);
                                       PipeBarrier<PIPE_V>();
                                       if (op == "scalar")
                                           Select(z, chosen, x, half(-1.0f), SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
                                       else Select(z, chosen, x, y, SELMODE::VSEL_TENSOR_TENSOR_MODE, count);
                                   });
}

TWIN_CASE(vec_index)
{
    return vector_case<float, float>(
        arguments, 100,
        [&](LocalTensor<float> z, LocalTensor<float>, LocalTensor<float>, uint32_t) { CreateVecIndex(z, 5.0f, 100); });
}

TWIN_CASE(mask_state)
{
    // Three ways to add on 100 of 256 lanes: bits, counter mode, and the mask register set from outside.
    const std::string op = arguments.text("op");
    const uint32_t n = static_cast<uint32_t>(arguments.load<half>("x").size());
    return vector_case<half, half>(
        arguments, n, [&](LocalTensor<half> z, LocalTensor<half> x, LocalTensor<half> y, uint32_t count) {
            Duplicate(z, half(7), static_cast<int32_t>(count));
            PipeBarrier<PIPE_V>();
            if (op == "bits") {
                uint64_t bits[2] = {0x5555555555555555ull, 0xFull};
                Add(z, x, y, bits, 2, BinaryRepeatParams(1, 1, 1, 8, 8, 8));
            } else if (op == "counter") {
                SetMaskCount();
                SetVectorMask<half, MaskMode::COUNTER>(200);
                Add<half, false>(z, x, y, MASK_PLACEHOLDER, 1, BinaryRepeatParams(1, 1, 1, 8, 8, 8));
                SetMaskNorm();
                ResetMask();
            } else {
                SetMaskNorm();
                SetVectorMask<half>(100);
                Add<half, false>(z, x, y, MASK_PLACEHOLDER, 2, BinaryRepeatParams(1, 1, 1, 8, 8, 8));
                ResetMask();
            }
        });
}

namespace {

// C = A B^T or A B in one tile of one cube core, with explicit flags. A is m x k, B is n x k (transposed_b) or k x n.
template <typename T, typename R>
void gemm_tile(GlobalTensor<R> c, GlobalTensor<T> a, GlobalTensor<T> b, int m, int n, int k, bool transposed_b)
{
    const int m16 = (m + 15) / 16 * 16, n16 = (n + 15) / 16 * 16, k16 = (k + 15) / 16 * 16;
    TPipe pipe;
    TBuf<TPosition::A1> a1;
    TBuf<TPosition::B1> b1;
    TBuf<TPosition::A2> a2;
    TBuf<TPosition::B2> b2;
    TBuf<TPosition::CO1> co1;
    pipe.InitBuffer(a1, m16 * k16 * sizeof(T));
    pipe.InitBuffer(b1, n16 * k16 * sizeof(T));
    pipe.InitBuffer(a2, m16 * k16 * sizeof(T));
    pipe.InitBuffer(b2, n16 * k16 * sizeof(T));
    pipe.InitBuffer(co1, m16 * n16 * sizeof(float));
    LocalTensor<T> la1 = a1.Get<T>(), lb1 = b1.Get<T>(), la2 = a2.Get<T>(), lb2 = b2.Get<T>();
    LocalTensor<float> lc = co1.Get<float>();
    const TEventID in = pipe.AllocEventID<HardEvent::MTE2_MTE1>();
    const TEventID go = pipe.AllocEventID<HardEvent::MTE1_M>();
    const TEventID out = pipe.AllocEventID<HardEvent::M_FIX>();
    const auto nz = [](int rows, int columns) {
        Nd2NzParams p;
        p.ndNum = 1;
        p.nValue = rows;
        p.dValue = columns;
        p.srcDValue = columns;
        p.dstNzC0Stride = (rows + 15) / 16 * 16;
        p.dstNzNStride = 1;
        return p;
    };
    DataCopy(la1, a, nz(m, k));
    const int b_rows = transposed_b ? n : k, b_columns = transposed_b ? k : n;
    DataCopy(lb1, b, nz(b_rows, b_columns));
    SetFlag<HardEvent::MTE2_MTE1>(in);
    WaitFlag<HardEvent::MTE2_MTE1>(in);
    for (int i = 0; i < m16 / 16; ++i) {
        LoadData2DParams p;
        p.startIndex = i;
        p.repeatTimes = k16 / 16;
        p.srcStride = m16 / 16;
        LoadData(la2[i * 16 * k16], la1, p);
    }
    for (int i = 0; i < k16 / 16; ++i) {
        LoadData2DParams p;
        p.startIndex = transposed_b ? i * (n16 / 16) : i;
        p.repeatTimes = n16 / 16;
        p.srcStride = transposed_b ? 1 : k16 / 16;
        p.ifTranspose = !transposed_b;
        LoadData(lb2[i * 16 * n16], lb1, p);
    }
    SetFlag<HardEvent::MTE1_M>(go);
    WaitFlag<HardEvent::MTE1_M>(go);
    MmadParams mm;
    mm.m = m;
    mm.n = n;
    mm.k = k;
    mm.cmatrixInitVal = true;
    Mmad(lc, la2, lb2, mm);
    SetFlag<HardEvent::M_FIX>(out);
    WaitFlag<HardEvent::M_FIX>(out);
    FixpipeParamsV220 f;
    f.nSize = n16;
    f.mSize = m;
    f.srcStride = m16;
    f.dstStride = n16;
    f.quantPre = std::is_same_v<R, half> ? F322F16 : std::is_same_v<R, bfloat16_t> ? F322BF16 : NoQuant;
    Fixpipe<R, float, CFG_ROW_MAJOR>(c, lc, f);
    pipe.ReleaseEventID<HardEvent::MTE2_MTE1>(in);
    pipe.ReleaseEventID<HardEvent::MTE1_M>(go);
    pipe.ReleaseEventID<HardEvent::M_FIX>(out);
}

template <typename T, typename R>
twin::Report gemm(const harness::Arguments& arguments)
{
    twin::Device device;
    const int m = arguments.number("m"), n = arguments.number("n"), k = arguments.number("k");
    const bool transposed = arguments.number("transposed", 1) != 0;
    const int n16 = (n + 15) / 16 * 16;
    T* a = device.input("a", arguments.load<T>("a"));
    T* b = device.input("b", arguments.load<T>("b"));
    R* c = device.output<R>("c", static_cast<size_t>(m * n16));
    twin::Options options = arguments.options();
    options.shape = twin::Shape::aic_only;
    const twin::Report report = device.launch("gemm", 1, options, [&] {
        GlobalTensor<T> ga, gb;
        GlobalTensor<R> gc;
        ga.SetGlobalBuffer(a, m * k);
        gb.SetGlobalBuffer(b, n * k);
        gc.SetGlobalBuffer(c, m * n16);
        SetSaturationFlag<SaturationMode::FLOAT>(arguments.text("overflow") == "saturate");
        gemm_tile<T, R>(gc, ga, gb, m, n, k, transposed);
    });
    arguments.save("c", c, static_cast<size_t>(m * n16));
    return report;
}

}  // namespace

TWIN_CASE(gemm_half_float) { return gemm<half, float>(arguments); }
TWIN_CASE(gemm_half_half) { return gemm<half, half>(arguments); }
TWIN_CASE(gemm_half_bf16) { return gemm<half, bfloat16_t>(arguments); }
TWIN_CASE(gemm_bf16_float) { return gemm<bfloat16_t, float>(arguments); }

#include <chrono>

TWIN_CASE(speed)
{
    // Milliseconds of one 128 x 128 x 128 Mmad and of half vector calls on 128 x 128, checks included.
    twin::Device device;
    float* out = device.output<float>("ms", 64);
    const int rounds = arguments.number("rounds", 20);
    twin::Options options = arguments.options();
    options.switch_one_in = 0;
    std::map<std::string, double> spent;
    const auto timed = [&](const char* name, auto&& work) {
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < rounds; ++i) work();
        spent[name] =
            std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() / rounds;
    };
    const twin::Report report = device.launch("speed", 1, options, [&] {
        if ASCEND_IS_AIC {
            std::vector<half> zeros(128 * 128, half(0));
            LocalTensor<half> l1(TPosition::A1, 0, 128 * 128), a(TPosition::A2, 0, 128 * 128),
                b(TPosition::B2, 0, 128 * 128);
            LocalTensor<float> c(TPosition::CO1, 0, 128 * 128);
            const twin::Span s = l1.span();
            s.memory->set_initialised();
            std::memset(s.memory->data(), 0, s.memory->size());
            LoadData2DParams p;
            p.repeatTimes = 64;
            p.srcStride = 1;
            LoadData(a, l1, p);
            LoadData(b, l1, p);
            SetFlag<HardEvent::MTE1_M>(0);
            WaitFlag<HardEvent::MTE1_M>(0);
            MmadParams mm;
            mm.m = mm.n = mm.k = 128;
            timed("mmad", [&] { Mmad(c, a, b, mm); });
        } else if (GetSubBlockIdx() == 0) {
            LocalTensor<half> x(TPosition::VECCALC, 0, 128 * 128), y(TPosition::VECCALC, 32768, 128 * 128),
                z(TPosition::VECCALC, 65536, 128 * 128);
            Duplicate(x, half(1), 128 * 128);
            Duplicate(y, half(2), 128 * 128);
            PipeBarrier<PIPE_V>();
            Exp(z, x, 128 * 128);
            PipeBarrier<PIPE_V>();
            timed("add", [&] {
                Add(z, x, y, 128 * 128);
                PipeBarrier<PIPE_V>();
            });
            timed("muls", [&] {
                Muls(z, x, half(3), 128 * 128);
                PipeBarrier<PIPE_V>();
            });
            timed("exp", [&] {
                Exp(z, x, 128 * 128);
                PipeBarrier<PIPE_V>();
            });
            timed("reduce", [&] {
                ReduceRepeat<ReduceType::MAX>(z, x, 128, 128, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
                PipeBarrier<PIPE_V>();
            });
        }
        static_cast<void>(out);
    });
    for (const auto& [name, ms] : spent) std::fprintf(stderr, "%s %.4f ms\n", name.c_str(), ms);
    return report;
}
