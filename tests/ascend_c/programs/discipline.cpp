// Small kernels in a correct form and with one seeded bug each. `bug=none` must pass in every mode and interleaving.
#include "harness.h"

using namespace AscendC;

namespace {

std::vector<half> ramp(size_t n)
{
    std::vector<half> values(n);
    for (size_t i = 0; i < n; ++i) values[i] = half(static_cast<float>(i % 199) - 99.0f);
    return values;
}

// z = 2 x + 1 by tiles through two input and two output buffers, with explicit flags.
class TiledVector {
public:
    explicit TiledVector(const std::string& bug) : bug_(bug) {}

    void run(half* gx, half* gz)
    {
        TPipe pipe;
        TBuf<TPosition::VECIN> bin;
        TBuf<TPosition::VECOUT> bout;
        pipe.InitBuffer(bin, 2 * kTile * sizeof(half));
        pipe.InitBuffer(bout, 2 * kTile * sizeof(half));
        GlobalTensor<half> x, z;
        x.SetGlobalBuffer(gx, kTile * kTiles);
        z.SetGlobalBuffer(gz, kTile * kTiles);
        TEventID ready[2], free_in[2], done[2], free_out[2];
        for (int b = 0; b < 2; ++b) {
            ready[b] = pipe.AllocEventID<HardEvent::MTE2_V>();
            free_in[b] = pipe.AllocEventID<HardEvent::V_MTE2>();
            done[b] = pipe.AllocEventID<HardEvent::V_MTE3>();
            free_out[b] = pipe.AllocEventID<HardEvent::MTE3_V>();
        }
        for (int t = 0; t < kTiles; ++t) {
            const int b = t % 2;
            LocalTensor<half> in = bin.Get<half>()[b * kTile], out = bout.Get<half>()[b * kTile];
            if (t >= 2 && bug_ != "no_v_mte2") WaitFlag<HardEvent::V_MTE2>(free_in[b]);
            DataCopy(in, x[t * kTile], kTile);
            if (bug_ != "no_mte2_v") {
                SetFlag<HardEvent::MTE2_V>(ready[b]);
                if (bug_ == "double_set") SetFlag<HardEvent::MTE2_V>(ready[b]);
                WaitFlag<HardEvent::MTE2_V>(ready[b]);
            }
            if (t >= 2 && bug_ != "no_mte3_v") WaitFlag<HardEvent::MTE3_V>(free_out[b]);
            Muls(out, in, half(2), kTile);
            if (bug_ != "no_barrier") PipeBarrier<PIPE_V>();
            Adds(out, out, half(1), kTile);
            if (bug_ != "no_v_mte2" && (t + 2 < kTiles || bug_ == "leaked_flag"))
                SetFlag<HardEvent::V_MTE2>(free_in[b]);
            if (bug_ != "no_v_mte3") {
                SetFlag<HardEvent::V_MTE3>(done[b]);
                WaitFlag<HardEvent::V_MTE3>(done[b]);
            }
            DataCopy(z[t * kTile], out, kTile);
            if (bug_ != "no_mte3_v" && t + 2 < kTiles) SetFlag<HardEvent::MTE3_V>(free_out[b]);
        }
        for (int b = 0; b < 2; ++b) {
            pipe.ReleaseEventID<HardEvent::MTE2_V>(ready[b]);
            pipe.ReleaseEventID<HardEvent::V_MTE2>(free_in[b]);
            pipe.ReleaseEventID<HardEvent::V_MTE3>(done[b]);
            pipe.ReleaseEventID<HardEvent::MTE3_V>(free_out[b]);
        }
    }

    static constexpr int kTile = 1024;
    static constexpr int kTiles = 6;

private:
    std::string bug_;
};

// The same by queues.
void queued_vector(half* gx, half* gz, const std::string& bug)
{
    constexpr int tile = TiledVector::kTile, tiles = TiledVector::kTiles;
    TPipe pipe;
    TQue<TPosition::VECIN, 1> in;
    TQue<TPosition::VECOUT, 1> out;
    pipe.InitBuffer(in, 2, tile * sizeof(half));
    pipe.InitBuffer(out, 2, tile * sizeof(half));
    GlobalTensor<half> x, z;
    x.SetGlobalBuffer(gx);
    z.SetGlobalBuffer(gz);
    if (bug == "deque_empty") in.DeQue<half>();
    for (int t = 0; t < tiles; ++t) {
        LocalTensor<half> loaded = in.AllocTensor<half>();
        DataCopy(loaded, x[t * tile], tile);
        in.EnQue(loaded);
        if (bug == "depth") {
            LocalTensor<half> more = in.AllocTensor<half>();
            in.EnQue(more);
        }
        if (bug == "still_queued") return;
        LocalTensor<half> a = in.DeQue<half>();
        LocalTensor<half> b = out.AllocTensor<half>();
        Muls(b, a, half(2), tile);
        PipeBarrier<PIPE_V>();
        Adds(b, b, half(1), tile);
        if (bug != "no_free") in.FreeTensor(a);
        if (bug == "double_free") in.FreeTensor(a);
        if (bug == "foreign") in.FreeTensor(b);
        if (bug == "use_after_free") {
            LocalTensor<half> next = in.AllocTensor<half>();
            LocalTensor<half> again = in.AllocTensor<half>();
            DataCopy(again, x, tile);
            Adds(b, a, half(1), tile);
            in.FreeTensor(next);
            in.FreeTensor(again);
        }
        out.EnQue(b);
        b = out.DeQue<half>();
        DataCopy(z[t * tile], b, tile);
        out.FreeTensor(b);
    }
}

// C = A B^T by tiles of k with L0 double buffers and accumulation in L0C, then to L1 and back through the cube once.
void cube_kernel(half* ga, half* gb, float* gc, const std::string& bug)
{
    constexpr int side = 32, k = 128, step = 32;  // (32 / 16)^2 = 4 < 10 fractals: accumulation needs a barrier
    TPipe pipe;
    TBuf<TPosition::A1> l1;
    TBuf<TPosition::A2> l0a;
    TBuf<TPosition::B2> l0b;
    TBuf<TPosition::CO1> l0c;
    pipe.InitBuffer(l1, 2 * side * k * sizeof(half));
    pipe.InitBuffer(l0a, 2 * side * step * sizeof(half));
    pipe.InitBuffer(l0b, 2 * side * step * sizeof(half));
    pipe.InitBuffer(l0c, side * side * sizeof(float));
    GlobalTensor<half> a, b;
    GlobalTensor<float> c;
    a.SetGlobalBuffer(ga, side * k);
    b.SetGlobalBuffer(gb, side * k);
    c.SetGlobalBuffer(gc, side * side);
    LocalTensor<half> a1 = l1.Get<half>(), b1 = l1.Get<half>()[side * k];
    LocalTensor<float> co = l0c.Get<float>();
    Nd2NzParams nz;
    nz.ndNum = 1;
    nz.nValue = side;
    nz.dValue = k;
    nz.srcDValue = k;
    nz.dstNzC0Stride = side;
    nz.dstNzNStride = 1;
    DataCopy(a1, a, nz);
    DataCopy(b1, b, nz);
    const TEventID loaded = pipe.AllocEventID<HardEvent::MTE2_MTE1>();
    const TEventID result = pipe.AllocEventID<HardEvent::M_FIX>();
    TEventID ready[2], freed[2];
    for (int i = 0; i < 2; ++i) {
        ready[i] = pipe.AllocEventID<HardEvent::MTE1_M>();
        freed[i] = pipe.AllocEventID<HardEvent::M_MTE1>();
    }
    if (bug != "no_mte2_mte1") {
        SetFlag<HardEvent::MTE2_MTE1>(loaded);
        WaitFlag<HardEvent::MTE2_MTE1>(loaded);
    }
    for (int t = 0; t < k / step; ++t) {
        const int buffer = t % 2;
        LocalTensor<half> a2 = l0a.Get<half>()[buffer * side * step], b2 = l0b.Get<half>()[buffer * side * step];
        if (t >= 2 && bug != "no_m_mte1") WaitFlag<HardEvent::M_MTE1>(freed[buffer]);
        for (int m1 = 0; m1 < side / 16; ++m1) {
            LoadData2DParams p;
            p.startIndex = t * (step / 16) * (side / 16) + m1;
            p.repeatTimes = step / 16;
            p.srcStride = side / 16;
            LoadData(a2[m1 * 16 * step], a1, p);
        }
        LoadData2DParams p;
        p.startIndex = t * (step / 16) * (side / 16);
        p.repeatTimes = step / 16 * (side / 16);
        p.srcStride = 1;
        LoadData(b2, b1, p);
        if (bug != "no_mte1_m") {
            SetFlag<HardEvent::MTE1_M>(ready[buffer]);
            WaitFlag<HardEvent::MTE1_M>(ready[buffer]);
        }
        MmadParams mm;
        mm.m = mm.n = side;
        mm.k = step;
        mm.cmatrixInitVal = t == 0;
        mm.unitFlag = bug == "unit_flag" ? (t + 1 == k / step ? 3 : 2) : 0;
        if (t > 0 && bug != "no_barrier_m") PipeBarrier<PIPE_M>();
        Mmad(co, a2, b2, mm);
        if (t + 2 < k / step && bug != "no_m_mte1") SetFlag<HardEvent::M_MTE1>(freed[buffer]);
    }
    if (bug != "no_m_fix" && bug != "unit_flag") {
        SetFlag<HardEvent::M_FIX>(result);
        WaitFlag<HardEvent::M_FIX>(result);
    }
    FixpipeParamsV220 f;
    f.nSize = f.mSize = f.srcStride = f.dstStride = side;
    f.unitFlag = bug == "unit_flag" ? 3 : 0;
    Fixpipe<float, float, CFG_ROW_MAJOR>(c, co, f);
    if (bug == "own_event") SetFlag<HardEvent::M_MTE1>(0);
    pipe.ReleaseEventID<HardEvent::MTE2_MTE1>(loaded);
    pipe.ReleaseEventID<HardEvent::M_FIX>(result);
    for (int i = 0; i < 2; ++i) {
        pipe.ReleaseEventID<HardEvent::MTE1_M>(ready[i]);
        pipe.ReleaseEventID<HardEvent::M_MTE1>(freed[i]);
    }
}

// Ping-pong between a cube core and its vector cores through two GM slots, as attention kernels do it.
class Mixed {
public:
    static constexpr int kSide = 32, kRounds = 5;

    Mixed(half* a, half* slots, half* z, const std::string& bug) : a_(a), slots_(slots), z_(z), bug_(bug) {}

    void run()
    {
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
        TPipe pipe;
        if ASCEND_IS_AIC {
            cube(pipe);
        }
        if ASCEND_IS_AIV {
            vector(pipe);
        }
    }

private:
    static constexpr uint16_t kReady = 0, kFree = 1, kPair = 2, kAll = 3;
    int tile() const { return kSide * kSide; }
    int slot(int group, int round) const { return (group * 2 + round % 2) * tile(); }

    void cube(TPipe& pipe)
    {
        const int group = GetBlockIdx();
        TBuf<TPosition::A1> l1;
        TBuf<TPosition::A2> l0a;
        TBuf<TPosition::B2> l0b;
        TBuf<TPosition::CO1> l0c;
        pipe.InitBuffer(l1, tile() * sizeof(half));
        pipe.InitBuffer(l0a, tile() * sizeof(half));
        pipe.InitBuffer(l0b, tile() * sizeof(half));
        pipe.InitBuffer(l0c, tile() * sizeof(float));
        GlobalTensor<half> a, s;
        a.SetGlobalBuffer(a_);
        s.SetGlobalBuffer(slots_);
        for (int r = 0; r < kRounds; ++r) {
            PipeBarrier<PIPE_ALL>();  // one round at a time on this core: the other core is what is tested
            Nd2NzParams nz(1, kSide, kSide, 0, kSide, kSide, 1, 0);
            DataCopy(l1.Get<half>(), a[(group * kRounds + r) * tile()], nz);
            PipeBarrier<PIPE_ALL>();
            LoadData2DParams p;
            p.repeatTimes = 2;
            p.srcStride = 2;
            LoadData(l0a.Get<half>(), l1.Get<half>(), p);
            p.startIndex = 1;
            LoadData(l0a.Get<half>()[2 * 256], l1.Get<half>(), p);
            p = LoadData2DParams();
            p.repeatTimes = 4;
            p.srcStride = 1;
            LoadData(l0b.Get<half>(), l1.Get<half>(), p);
            PipeBarrier<PIPE_ALL>();
            MmadParams mm;
            mm.m = mm.n = mm.k = kSide;
            Mmad(l0c.Get<float>(), l0a.Get<half>(), l0b.Get<half>(), mm);
            PipeBarrier<PIPE_ALL>();
            if (r >= 2 && bug_ != "no_free_wait") CrossCoreWaitFlag(kFree);
            FixpipeParamsV220 f;
            f.nSize = f.mSize = f.srcStride = f.dstStride = kSide;
            f.quantPre = F322F16;
            Fixpipe<half, float, CFG_ROW_MAJOR>(s[slot(group, r)], l0c.Get<float>(), f);
            if (bug_ == "wrong_pipe") CrossCoreSetFlag<2, PIPE_MTE2>(kReady);
            else if (bug_ != "deadlock" || r < 3) CrossCoreSetFlag<2, PIPE_FIX>(kReady);
        }
        if (bug_ == "no_free_wait") {
            for (int r = 2; r < kRounds; ++r) CrossCoreWaitFlag(kFree);
        }
    }

    void vector(TPipe& pipe)
    {
        const int group = GetBlockIdx() / 2, half_tile = tile() / 2;
        TQue<TPosition::VECIN, 1> in;
        TQue<TPosition::VECOUT, 1> out;
        pipe.InitBuffer(in, 2, half_tile * sizeof(half));
        pipe.InitBuffer(out, 2, half_tile * sizeof(half));
        GlobalTensor<half> s, z;
        s.SetGlobalBuffer(slots_);
        z.SetGlobalBuffer(z_);
        for (int r = 0; r < kRounds; ++r) {
            const int offset = static_cast<int>(GetSubBlockIdx()) * half_tile;
            if (bug_ != "no_ready_wait") CrossCoreWaitFlag(kReady);
            LocalTensor<half> x = in.AllocTensor<half>();
            DataCopy(x, s[slot(group, r) + offset], half_tile);
            if (r + 2 < kRounds || bug_ == "leftover") {
                if (bug_ != "one_sided" || GetSubBlockIdx() == 0) CrossCoreSetFlag<2, PIPE_MTE2>(kFree);
            }
            in.EnQue(x);
            x = in.DeQue<half>();
            LocalTensor<half> y = out.AllocTensor<half>();
            Adds(y, x, half(1), half_tile);
            in.FreeTensor(x);
            out.EnQue(y);
            y = out.DeQue<half>();
            DataCopy(z[(group * kRounds + r) * tile() + offset], y, half_tile);
            out.FreeTensor(y);
        }
        if (bug_ == "no_ready_wait") {
            for (int r = 0; r < kRounds; ++r) CrossCoreWaitFlag(kReady);
        }
        CrossCoreSetFlag<1, PIPE_MTE3>(kPair);
        if (bug_ != "no_pair_wait") CrossCoreWaitFlag<1>(kPair);
        CrossCoreSetFlag<0, PIPE_MTE3>(kAll);
        CrossCoreWaitFlag<0>(kAll);
        if (bug_ == "too_many") {
            for (int i = 0; i < 16; ++i) CrossCoreSetFlag<1, PIPE_MTE3>(5);
        }
    }

    half *a_, *slots_, *z_;
    std::string bug_;
};

}  // namespace

TWIN_CASE(tiled)
{
    twin::Device device;
    const std::vector<half> x = ramp(TiledVector::kTile * TiledVector::kTiles);
    half* gx = device.input("x", x);
    half* gz = device.output<half>("z", x.size());
    twin::Options options = arguments.options();
    options.shape = twin::Shape::aiv_only;
    options.strict_vector = arguments.number("strict", 1) != 0;
    const twin::Report report =
        device.launch("tiled", 1, options, [&] { TiledVector(arguments.text("bug")).run(gx, gz); });
    arguments.save("z", gz, x.size());
    arguments.save("x", x.data(), x.size());
    return report;
}

TWIN_CASE(queued)
{
    twin::Device device;
    const std::vector<half> x = ramp(TiledVector::kTile * TiledVector::kTiles);
    half* gx = device.input("x", x);
    half* gz = device.output<half>("z", x.size());
    twin::Options options = arguments.options();
    options.shape = twin::Shape::aiv_only;
    const twin::Report report =
        device.launch("queued", 1, options, [&] { queued_vector(gx, gz, arguments.text("bug")); });
    arguments.save("z", gz, x.size());
    arguments.save("x", x.data(), x.size());
    return report;
}

TWIN_CASE(cube)
{
    twin::Device device;
    std::vector<half> a = ramp(32 * 128), b = ramp(32 * 128);
    for (half& v : a) v = half(static_cast<float>(static_cast<int>(static_cast<float>(v)) % 7));
    for (half& v : b) v = half(static_cast<float>(static_cast<int>(static_cast<float>(v)) % 5));
    half* ga = device.input("a", a);
    half* gb = device.input("b", b);
    float* gc = device.output<float>("c", 32 * 32);
    twin::Options options = arguments.options();
    options.shape = twin::Shape::aic_only;
    const twin::Report report =
        device.launch("cube", 1, options, [&] { cube_kernel(ga, gb, gc, arguments.text("bug")); });
    arguments.save("a", a.data(), a.size());
    arguments.save("b", b.data(), b.size());
    arguments.save("c", gc, 32 * 32);
    return report;
}

TWIN_CASE(mixed)
{
    twin::Device device;
    const int groups = 3, n = groups * Mixed::kRounds * Mixed::kSide * Mixed::kSide;
    std::vector<half> a(static_cast<size_t>(n));
    for (int i = 0; i < n; ++i) a[static_cast<size_t>(i)] = half(static_cast<float>(i * 7919 % 5 - 2));
    half* ga = device.input("a", a);
    half* slots = device.workspace<half>("slots", groups * 2 * Mixed::kSide * Mixed::kSide);
    half* gz = device.output<half>("z", static_cast<size_t>(n));
    const twin::Report report =
        device.launch("mixed", groups, arguments.options(), [&] { Mixed(ga, slots, gz, arguments.text("bug")).run(); });
    arguments.save("a", a.data(), a.size());
    arguments.save("z", gz, a.size());
    return report;
}
