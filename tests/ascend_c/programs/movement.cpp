// Copies with gaps and padding, a product that stays on the chip, queues on the cube core, SyncAll.
#include "harness.h"

using namespace AscendC;

TWIN_CASE(padded)
{
    // Rows of `columns` halves, `gap` bytes apart in GM, into padded UB rows; doubled, and back to dense rows.
    twin::Device device;
    const std::vector<half> x = arguments.load<half>("x");
    const int rows = arguments.number("rows"), columns = arguments.number("columns"), right = arguments.number("right");
    const int padded = (columns + right + 15) / 16 * 16;
    half* gx = device.input("x", x);
    half* gz = device.output<half>("z", static_cast<size_t>(rows * columns));
    half* gw = device.output<half>("w", static_cast<size_t>(rows * padded));
    twin::Options options = arguments.options();
    options.shape = twin::Shape::aiv_only;
    const twin::Report report = device.launch("padded", 1, options, [&] {
        TPipe pipe;
        TQue<TPosition::VECIN, 1> in;
        TQue<TPosition::VECOUT, 1> out;
        pipe.InitBuffer(in, 1, rows * padded * sizeof(half));
        pipe.InitBuffer(out, 1, rows * padded * sizeof(half));
        GlobalTensor<half> gmx, gmz, gmw;
        gmx.SetGlobalBuffer(gx);
        gmz.SetGlobalBuffer(gz);
        gmw.SetGlobalBuffer(gw);
        LocalTensor<half> a = in.AllocTensor<half>();
        DataCopyExtParams load;
        load.blockCount = rows;
        load.blockLen = columns * sizeof(half);
        load.srcStride = arguments.number("gap");
        DataCopyPadExtParams<half> pad;
        pad.isPad = right > 0;
        pad.rightPadding = right;
        pad.paddingValue = half(9);
        DataCopyPad(a, gmx, load, pad);
        in.EnQue(a);
        a = in.DeQue<half>();
        LocalTensor<half> b = out.AllocTensor<half>();
        DataCopy(b, a, rows * padded);  // UB to UB is a vector instruction
        PipeBarrier<PIPE_V>();
        Add(b, b, a, rows * padded);
        in.FreeTensor(a);
        out.EnQue(b);
        b = out.DeQue<half>();
        DataCopyExtParams store;
        store.blockCount = rows;
        store.blockLen = columns * sizeof(half);
        store.srcStride = padded / 16 - (columns + 15) / 16;
        DataCopyPad(gmz, b, store);
        DataCopy(gmw, b, DataCopyParams(rows, padded / 16, 0, 0));
        out.FreeTensor(b);
    });
    arguments.save("z", gz, static_cast<size_t>(rows * columns));
    arguments.save("w", gw, static_cast<size_t>(rows * padded));
    return report;
}

TWIN_CASE(strided)
{
    // Every second 32-byte block of the input, written with one block between them.
    twin::Device device;
    const std::vector<half> x = arguments.load<half>("x");
    half* gx = device.input("x", x);
    half* gz = device.output<half>("z", x.size());
    const int blocks = static_cast<int>(x.size() / 16);
    twin::Options options = arguments.options();
    options.shape = twin::Shape::aiv_only;
    const twin::Report report = device.launch("strided", 1, options, [&] {
        const uint32_t n = static_cast<uint32_t>(x.size());
        LocalTensor<half> y(TPosition::VECIN, 0, n), out(TPosition::VECOUT, 0, n);  // one place, named for both copies
        GlobalTensor<half> gmx, gmz;
        gmx.SetGlobalBuffer(gx);
        gmz.SetGlobalBuffer(gz);
        Duplicate(y, half(0), n);
        SetFlag<HardEvent::V_MTE2>(0);
        WaitFlag<HardEvent::V_MTE2>(0);
        DataCopyParams p;
        p.blockCount = blocks / 2;
        p.blockLen = 1;
        p.srcGap = 1;
        p.dstGap = 1;
        DataCopy(y, gmx, p);
        SetFlag<HardEvent::MTE2_MTE3>(0);
        WaitFlag<HardEvent::MTE2_MTE3>(0);
        SetFlag<HardEvent::V_MTE3>(0);
        WaitFlag<HardEvent::V_MTE3>(0);
        DataCopy(gmz, out, n);
    });
    arguments.save("z", gz, x.size());
    return report;
}

TWIN_CASE(chain)
{
    // Z = (A B^T) D with queues throughout; A B^T is rounded to half once and stays in L1.
    twin::Device device;
    constexpr int side = 64;
    half* ga = device.input("a", arguments.load<half>("a"));
    half* gb = device.input("b", arguments.load<half>("b"));
    half* gd = device.input("d", arguments.load<half>("d"));
    float* gz = device.output<float>("z", side * side);
    twin::Options options = arguments.options();
    options.shape = twin::Shape::aic_only;
    const twin::Report report = device.launch("chain", 1, options, [&] {
        TPipe pipe;
        TQue<TPosition::A1, 1> a1;
        TQue<TPosition::B1, 1> b1;
        TQue<TPosition::A2, 1> a2;
        TQue<TPosition::B2, 1> b2;
        TQue<TPosition::CO1, 1> co1;
        TBuf<TPosition::A1> product;
        pipe.InitBuffer(a1, 1, side * side * sizeof(half));
        pipe.InitBuffer(b1, 2, side * side * sizeof(half));
        pipe.InitBuffer(a2, 1, side * side * sizeof(half));
        pipe.InitBuffer(b2, 1, side * side * sizeof(half));
        pipe.InitBuffer(co1, 1, side * side * sizeof(float));
        pipe.InitBuffer(product, side * side * sizeof(half));
        const auto load_nz = [&](auto& queue, half* from) {
            GlobalTensor<half> gm;
            gm.SetGlobalBuffer(from, side * side);
            LocalTensor<half> l1 = queue.template AllocTensor<half>();
            DataCopy(l1, gm, Nd2NzParams(1, side, side, 0, side, side, 1, 0));
            queue.EnQue(l1);
        };
        const auto load_left = [&](const LocalTensor<half>& l1) {
            LocalTensor<half> l0 = a2.AllocTensor<half>();
            for (int i = 0; i < side / 16; ++i)
                LoadData(l0[i * 16 * side], l1, LoadData2DParams(i, side / 16, side / 16, 0, 0, false, 0));
            a2.EnQue(l0);
        };
        const auto load_right = [&](const LocalTensor<half>& l1, bool transpose) {
            LocalTensor<half> l0 = b2.AllocTensor<half>();
            for (int i = 0; i < side / 16; ++i) {
                const int start = transpose ? i : i * (side / 16);
                LoadData(l0[i * 16 * side], l1,
                         LoadData2DParams(start, side / 16, transpose ? side / 16 : 1, 0, 0, transpose, 0));
            }
            b2.EnQue(l0);
        };
        const auto multiply = [&] {
            LocalTensor<half> left = a2.DeQue<half>(), right = b2.DeQue<half>();
            LocalTensor<float> c = co1.AllocTensor<float>();
            MmadParams mm(side, side, side, 0, false, true);
            Mmad(c, left, right, mm);
            a2.FreeTensor(left);
            b2.FreeTensor(right);
            co1.EnQue(c);
        };
        load_nz(a1, ga);
        load_nz(b1, gb);
        LocalTensor<half> a = a1.DeQue<half>(), b = b1.DeQue<half>();
        load_left(a);
        load_right(b, false);
        a1.FreeTensor(a);
        b1.FreeTensor(b);
        multiply();
        LocalTensor<float> c = co1.DeQue<float>();
        FixpipeParamsV220 f(side, side, side, side,
                            false);  // NZ: column blocks of 16 halves, dstStride in 32-byte blocks
        f.quantPre = F322F16;
        Fixpipe<half, float, CFG_NZ>(product.Get<half>(), c, f);
        co1.FreeTensor(c);
        const TEventID moved = pipe.AllocEventID<HardEvent::FIX_MTE1>();
        SetFlag<HardEvent::FIX_MTE1>(moved);
        WaitFlag<HardEvent::FIX_MTE1>(moved);
        pipe.ReleaseEventID<HardEvent::FIX_MTE1>(moved);
        load_nz(b1, gd);
        LocalTensor<half> d = b1.DeQue<half>();
        load_left(product.Get<half>());
        load_right(d, true);
        b1.FreeTensor(d);
        multiply();
        c = co1.DeQue<float>();
        GlobalTensor<float> z;
        z.SetGlobalBuffer(gz, side * side);
        Fixpipe<float, float>(z, c, FixpipeParamsV220(side, side, side, side, false));
        co1.FreeTensor(c);
    });
    arguments.save("z", gz, side * side);
    return report;
}

TWIN_CASE(sync_all)
{
    // Each core leaves a number; after SyncAll every vector core adds up all of them.
    twin::Device device;
    const int groups = arguments.number("groups", 4), cores = groups * 3;
    int32_t* slots = device.workspace<int32_t>("slots", static_cast<size_t>(cores) * 8);
    int32_t* sums = device.output<int32_t>("sums", static_cast<size_t>(groups) * 2 * 8);
    const bool skip = arguments.text("bug") == "skip";
    const twin::Report report = device.launch("sync_all", groups, arguments.options(), [&] {
        GlobalTensor<int32_t> s, z;
        s.SetGlobalBuffer(slots);
        z.SetGlobalBuffer(sums);
        const int me = ASCEND_IS_AIC ? static_cast<int>(GetBlockIdx()) : groups + static_cast<int>(GetBlockIdx());
        s.SetValue(static_cast<uint64_t>(me) * 8, me + 1);
        if (!skip) SyncAll<false>();
        if ASCEND_IS_AIV {
            int32_t sum = 0;
            for (int i = 0; i < cores; ++i) sum += s.GetValue(static_cast<uint64_t>(i) * 8);
            for (int i = 0; i < 8; ++i) z.SetValue(static_cast<uint64_t>(GetBlockIdx() * 8 + i), sum);
        }
    });
    arguments.save("sums", sums, static_cast<size_t>(groups) * 2 * 8);
    return report;
}

TWIN_CASE(two_launches)
{
    // What the first launch leaves in persistent memory the second one reads.
    twin::Device device;
    int32_t* kept = device.persistent<int32_t>("kept", 8);
    int32_t* z = device.output<int32_t>("z", 8);
    twin::Options options = arguments.options();
    options.shape = twin::Shape::aiv_only;
    const auto values = [&] {
        GlobalTensor<int32_t> k;
        k.SetGlobalBuffer(kept, 8);
        return k;
    };
    const twin::Report first = device.launch("write", 1, options, [&] {
        GlobalTensor<int32_t> k = values();
        for (uint64_t i = 0; i < 8; ++i) k.SetValue(i, 7);
    });
    if (!first.ok) return first;
    const twin::Report second = device.launch("read", 1, options, [&] {
        GlobalTensor<int32_t> k = values(), out;
        out.SetGlobalBuffer(z, 8);
        for (uint64_t i = 0; i < 8; ++i) out.SetValue(i, k.GetValue(i) + 1);
    });
    arguments.save("z", z, 8);
    return second;
}

// A product of constants: 2 in L0A, and in L0B 3 and 5 in every other fractal.
TWIN_CASE(fill)
{
    twin::Device device;
    float* gz = device.output<float>("z", 16 * 64);
    twin::Options options = arguments.options();
    options.shape = twin::Shape::aic_only;
    const twin::Report report = device.launch("fill", 1, options, [&] {
        TPipe pipe;
        TQue<TPosition::A2, 1> a2;
        TQue<TPosition::B2, 1> b2;
        TQue<TPosition::CO1, 1> co1;
        pipe.InitBuffer(a2, 1, 16 * 16 * sizeof(half));
        pipe.InitBuffer(b2, 1, 16 * 64 * sizeof(half));
        pipe.InitBuffer(co1, 1, 16 * 64 * sizeof(float));
        LocalTensor<half> left = a2.AllocTensor<half>(), right = b2.AllocTensor<half>();
        Fill(left, InitConstValueParams<half>(1, 1, 0, static_cast<half>(2.0f)));
        Fill(right, InitConstValueParams<half>(2, 1, 1, static_cast<half>(3.0f)));
        Fill(right[16 * 16], InitConstValueParams<half>(2, 1, 1, static_cast<half>(5.0f)));
        a2.EnQue(left);
        b2.EnQue(right);
        left = a2.DeQue<half>();
        right = b2.DeQue<half>();
        LocalTensor<float> c = co1.AllocTensor<float>();
        Mmad(c, left, right, MmadParams(16, 64, 16, 0, false, true));
        a2.FreeTensor(left);
        b2.FreeTensor(right);
        co1.EnQue(c);
        c = co1.DeQue<float>();
        GlobalTensor<float> z;
        z.SetGlobalBuffer(gz, 16 * 64);
        FixpipeParamsV220 f(64, 16, 16, 64, false);
        f.ndNum = 1;
        Fixpipe<float, float, CFG_ROW_MAJOR>(z, c, f);
        co1.FreeTensor(c);
    });
    arguments.save("z", gz, 16 * 64);
    return report;
}
