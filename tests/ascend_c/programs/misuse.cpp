// One wrong call at a time. Every snippet has a correct twin: `bug=0` runs it, `bug=1` runs it with the mistake.
#include "harness.h"

using namespace AscendC;

namespace {

struct Snippet {
    twin::Shape shape;
    std::function<void(bool, half*, float*)> run;  // the mistake, a GM input of 4096, a GM output of 4096
};

LocalTensor<half> ub(uint32_t address, uint32_t n) { return LocalTensor<half>(TPosition::VECCALC, address, n); }

// Snippets on vector cores start from x = 0..1023 at UB address 0, initialised.
LocalTensor<half> some_input()
{
    LocalTensor<half> x = ub(0, 1024);
    Duplicate(x, half(3), 1024);
    PipeBarrier<PIPE_V>();
    return x;
}

void cube_operands(LocalTensor<half>& a, LocalTensor<half>& b, half* gx)
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

MmadParams mmad_params(int m, int n, int k)
{
    MmadParams p;
    p.m = m;
    p.n = n;
    p.k = k;
    return p;
}

FixpipeParamsV220 fixpipe_params(int m, int n)
{
    FixpipeParamsV220 p;
    p.mSize = m;
    p.nSize = n;
    p.srcStride = (m + 15) / 16 * 16;
    p.dstStride = n;
    return p;
}

constexpr twin::Shape aiv = twin::Shape::aiv_only, aic = twin::Shape::aic_only;

const std::map<std::string, Snippet>& snippets()
{
    static const std::map<std::string, Snippet> all = {
        {"ub_capacity",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              TBuf<TPosition::VECCALC> big, more;
              pipe.InitBuffer(big, 180 * 1024);
              pipe.InitBuffer(more, bug ? 8 * 1024 : 3 * 1024);  // 192 KiB less the 8 KiB that the compiler reserves
          }}},
        {"l0c_capacity",
         {aic,
          [](bool bug, half*, float*) {
              TPipe pipe;
              TBuf<TPosition::CO1> c;
              pipe.InitBuffer(c, (bug ? 129 : 128) * 1024);
          }}},
        {"vector_on_cube",
         {aic,
          [](bool bug, half*, float*) {
              LocalTensor<half> x(TPosition::A1, 0, 1024);
              if (bug) Adds(x, x, half(1), 1024);
          }}},
        {"mmad_position",
         {aic,
          [](bool bug, half* gx, float*) {
              LocalTensor<half> a, b;
              cube_operands(a, b, gx);
              LocalTensor<float> c(TPosition::CO1, 0, 4096);
              Mmad(c, bug ? b : a, b, mmad_params(16, 16, 16));
          }}},
        {"gm_to_l0c",
         {aic,
          [](bool bug, half* gx, float*) {
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx, 4096);
              DataCopy(LocalTensor<half>(bug ? TPosition::CO1 : TPosition::A1, 0, 1024), x, 1024);
          }}},
        {"ub_alignment",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = some_input();
              Adds(ub(4096, 1024)[bug ? 8 : 16], x, half(1), 128);
          }}},
        {"copy_alignment",
         {aiv,
          [](bool bug, half* gx, float*) {
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx, 4096);
              DataCopy(ub(0, 1024), x, bug ? 63 : 64);
          }}},
        {"l0_alignment",
         {aic,
          [](bool bug, half* gx, float*) {
              LocalTensor<half> a, b;
              cube_operands(a, b, gx);
              LocalTensor<float> c(TPosition::CO1, 0, 4096);
              Mmad(c, a[bug ? 128 : 256], b, mmad_params(16, 16, 16));
          }}},
        {"mmad_alignment",
         {aic,
          [](bool bug, half* gx, float*) {
              LocalTensor<half> a, b;
              cube_operands(a, b, gx);
              LocalTensor<float> c(TPosition::CO1, 0, 4096);
              Mmad(c[bug ? 16 : 256], a, b, mmad_params(16, 16, 16));
          }}},
        {"repeat_range",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = ub(0, 80 * 1024);
              const int repeats = bug ? 256 : 255;
              Duplicate(x, half(0), uint64_t(128), repeats, 1, 8);
          }}},
        {"mask_range",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<float> x(TPosition::VECCALC, 0, 1024);
              Duplicate(x, 0.0f, uint64_t(bug ? 128 : 64), 1, 1, 8);
          }}},
        {"nd2nz_range",
         {aic,
          [](bool bug, half* gx, float*) {
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx, 4096);
              Nd2NzParams p(1, 1, 16, 0, bug ? 65536 : 65535, 16, 1, 0);
              DataCopy(LocalTensor<half>(TPosition::A1, 0, 1024), x, p);
          }}},
        {"fixpipe_range",
         {aic,
          [](bool bug, half* gx, float* gz) {
              LocalTensor<half> a, b;
              cube_operands(a, b, gx);
              LocalTensor<float> c(TPosition::CO1, 0, 4096);
              Mmad(c, a, b, mmad_params(32, 32, 16));
              PipeBarrier<PIPE_ALL>();
              GlobalTensor<float> z;
              z.SetGlobalBuffer(gz, 4096);
              Fixpipe<float, float>(z, c, fixpipe_params(32, bug ? 24 : 32));
          }}},
        {"tensor_bounds",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = some_input();
              Adds(ub(4096, 512), x, half(1), bug ? 528 : 512);
          }}},
        {"gm_bounds",
         {aiv,
          [](bool bug, half* gx, float*) {
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx);
              DataCopy(ub(0, 1024), x[bug ? 4032 : 4000], 96);
          }}},
        {"gm_foreign",
         {aiv,
          [](bool bug, half* gx, float*) {
              static half outside[16];
              GlobalTensor<half> x;
              x.SetGlobalBuffer(bug ? outside : gx, 16);
          }}},
        {"fixpipe_quant",
         {aic,
          [](bool bug, half* gx, float* gz) {
              LocalTensor<half> a, b;
              cube_operands(a, b, gx);
              LocalTensor<float> c(TPosition::CO1, 0, 4096);
              Mmad(c, a, b, mmad_params(16, 16, 16));
              PipeBarrier<PIPE_ALL>();
              GlobalTensor<half> z;
              z.SetGlobalBuffer(reinterpret_cast<half*>(gz), 4096);
              FixpipeParamsV220 p = fixpipe_params(16, 16);
              if (!bug) p.quantPre = F322F16;
              Fixpipe<half, float>(z, c, p);
          }}},
        {"cast_mode",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = some_input();
              Cast(LocalTensor<float>(TPosition::VECCALC, 4096, 1024), x,
                   bug ? RoundMode::CAST_RINT : RoundMode::CAST_NONE, 1024);
          }}},
        {"unwritten",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = some_input();
              Adds(ub(8192, 1024), bug ? ub(4096, 1024) : x, half(1), 1024);
          }}},
        {"unwritten_copy",
         {aiv,
          [](bool bug, half*, float* gz) {
              LocalTensor<half> x = some_input();
              PipeBarrier<PIPE_ALL>();
              GlobalTensor<half> z;
              z.SetGlobalBuffer(reinterpret_cast<half*>(gz), 4096);
              DataCopy(z, bug ? ub(4096, 1024) : x, 1024);
          }}},
        {"nd2nz_tail_rows",
         {aic,
          [](bool bug, half* gx, float*) {
              // 10 rows of a 16-row fractal: the tail rows hold nothing, and Mmad may not use them.
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx, 4096);
              LocalTensor<half> l1(TPosition::A1, 0, 256), a(TPosition::A2, 0, 256), b(TPosition::B2, 0, 256);
              DataCopy(l1, x, Nd2NzParams(1, 10, 16, 0, 16, 16, 1, 0));
              PipeBarrier<PIPE_ALL>();
              LoadData2DParams p;
              p.repeatTimes = 1;
              LoadData(a, l1, p);
              LoadData(b, l1, p);
              PipeBarrier<PIPE_ALL>();
              Mmad(LocalTensor<float>(TPosition::CO1, 0, 256), a, b, mmad_params(bug ? 16 : 10, 10, 16));
          }}},
        {"pad_undefined",
         {aiv,
          [](bool bug, half* gx, float*) {
              // Padding without isPad is random; with it, it is paddingValue.
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx, 4096);
              LocalTensor<half> y = ub(0, 16);
              DataCopyPad(y, x, DataCopyExtParams(1, 20, 0, 0, 0), DataCopyPadExtParams<half>(!bug, 0, 6, half(0)));
              PipeBarrier<PIPE_ALL>();
              Adds(ub(1024, 16), y, half(1), 16);
          }}},
        {"odd_bytes_handed_on",
         {aiv,
          [](bool bug, half*, float* gz) {
              // 21 halves, of which the last four hold nothing, through GM and back: the first 17 stay usable.
              LocalTensor<half> x = ub(0, 32), y = ub(1024, 32);
              Duplicate(x, half(1), 17);
              PipeBarrier<PIPE_ALL>();
              GlobalTensor<half> z;
              z.SetGlobalBuffer(reinterpret_cast<half*>(gz) + GetBlockIdx() * 64, 64);
              DataCopyPad(z, x, DataCopyExtParams(1, 42, 0, 0, 0));
              PipeBarrier<PIPE_ALL>();
              DataCopyPad(y, z, DataCopyExtParams(1, 42, 0, 0, 0), DataCopyPadExtParams<half>());
              PipeBarrier<PIPE_ALL>();
              Adds(x, y, half(1), bug ? 18 : 17);
          }}},
        {"overlap_partial",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = some_input();
              Adds(x[bug ? 16 : 0], x, half(1), 128);
          }}},
        {"overlap_next_repeat",
         {aiv,
          [](bool bug, half*, float*) {
              LocalTensor<half> x = some_input();
              Adds(x[bug ? 128 : 512], x, half(1), uint64_t(128), 3, UnaryRepeatParams(1, 1, 8, 8));
          }}},
        {"accumulate_in_place",
         {aiv,
          [](bool bug, half*, float*) {
              // dst as the second source with repeat stride 0 is the one overlap across repeats that is defined.
              LocalTensor<half> x = some_input();
              LocalTensor<half> sum = x[896];
              const BinaryRepeatParams p(1, 1, 1, 0, 8, 0);
              if (bug) Div(sum, x, sum, uint64_t(128), 7, p);
              else Add(sum, x, sum, uint64_t(128), 7, p);
          }}},
        {"event_id_range",
         {aiv,
          [](bool bug, half*, float*) {
              SetFlag<HardEvent::MTE2_V>(bug ? 8 : 7);
              WaitFlag<HardEvent::MTE2_V>(bug ? 8 : 7);
          }}},
        {"event_id_raw",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              const int id = bug ? 0 : pipe.FetchEventID<HardEvent::MTE2_V>();
              SetFlag<HardEvent::MTE2_V>(id);
              WaitFlag<HardEvent::MTE2_V>(id);
          }}},
        {"event_id_release",
         {aiv,
          [](bool bug, half*, float*) {
              TPipe pipe;
              const TEventID id = pipe.AllocEventID<HardEvent::MTE2_V>();
              pipe.ReleaseEventID<HardEvent::MTE2_V>(bug ? 3 : id);
          }}},
        {"event_id_exhausted",
         {aic,
          [](bool bug, half*, float*) {
              TPipe pipe;  // holds 0, 1 and 2 of M_MTE1 itself
              for (int i = 0; i < (bug ? 6 : 5); ++i) pipe.AllocEventID<HardEvent::M_MTE1>();
          }}},
        {"flag_unset",
         {aiv,
          [](bool bug, half*, float*) {
              if (!bug) SetFlag<HardEvent::MTE2_V>(1);
              WaitFlag<HardEvent::MTE2_V>(1);
          }}},
        {"flag_reuse",
         {aiv,
          [](bool bug, half*, float*) {
              // The second set may come before V has consumed the first: something must lead back from V to MTE2.
              SetFlag<HardEvent::MTE2_V>(1);
              WaitFlag<HardEvent::MTE2_V>(1);
              if (!bug) {
                  SetFlag<HardEvent::V_MTE2>(2);
                  WaitFlag<HardEvent::V_MTE2>(2);
              }
              SetFlag<HardEvent::MTE2_V>(1);
              WaitFlag<HardEvent::MTE2_V>(1);
          }}},
        {"event_on_wrong_core",
         {aiv,
          [](bool bug, half*, float*) {
              if (bug) SetFlag<HardEvent::MTE1_M>(0);
          }}},
        {"cross_core_aiv_only",
         {aiv,
          [](bool bug, half*, float*) {
              KERNEL_TASK_TYPE_DEFAULT(bug ? KERNEL_TYPE_AIV_ONLY : KERNEL_TYPE_MIX_AIV_1_0);
              CrossCoreSetFlag<0, PIPE_MTE3>(0);
              CrossCoreWaitFlag<0>(0);
          }}},
        {"cross_core_pipe",
         {aiv,
          [](bool bug, half*, float*) {
              if (bug) CrossCoreSetFlag<0, PIPE_S>(0);
              else CrossCoreSetFlag<0, PIPE_MTE3>(0);
              CrossCoreWaitFlag<0>(0);
          }}},
        {"scalar_auto_sync",
         {aiv,
          [](bool bug, half* gx, float*) {
              // The compiler orders S after V, but nothing orders V after MTE2.
              GlobalTensor<half> x;
              x.SetGlobalBuffer(gx, 4096);
              LocalTensor<half> y = ub(0, 64), z = ub(1024, 64);
              DataCopy(y, x, 64);
              if (!bug) {
                  SetFlag<HardEvent::MTE2_V>(0);
                  WaitFlag<HardEvent::MTE2_V>(0);
              }
              Adds(z, y, half(1), 64);
              z.SetValue(0, static_cast<float>(z.GetValue(1)) + 1);
          }}},
        {"nan_into_mmad",
         {aic,
          [](bool bug, half* gx, float*) {
              LocalTensor<half> a, b;
              cube_operands(a, b, gx);  // the last element of the input is NaN
              Mmad(LocalTensor<float>(TPosition::CO1, 0, 1024), bug ? a[3840] : a, b, mmad_params(16, 16, 16));
          }}},
        {"input_written",
         {aiv,
          [](bool bug, half* gx, float* gz) {
              LocalTensor<half> x = some_input();
              PipeBarrier<PIPE_ALL>();
              GlobalTensor<half> z;
              z.SetGlobalBuffer(bug ? gx : reinterpret_cast<half*>(gz), 1024);
              DataCopy(z, x, 1024);
          }}},
        {"guard",
         {aiv,
          [](bool bug, half*, float* gz) {
              if (bug) gz[4096 + 1] = 0;  // past the end, through the bare pointer
          }}},
    };
    return all;
}

}  // namespace

TWIN_CASE(snippet)
{
    twin::Device device;
    std::vector<half> x(4096, half(1));
    x.back() = std::numeric_limits<float>::quiet_NaN();
    half* gx = device.input("x", x);
    float* gz = device.output<float>("z", 4096);
    const Snippet& snippet = snippets().at(arguments.text("name"));
    twin::Options options = arguments.options();
    options.shape = snippet.shape;
    return device.launch(arguments.text("name"), 2, options, [&] {
        if (GetBlockIdx() == 0 || arguments.text("name").rfind("cross_core", 0) == 0)
            snippet.run(arguments.number("bug") != 0, gx, gz);
    });
}

TWIN_CASE(list)
{
    for (const auto& [name, snippet] : snippets()) std::fprintf(stderr, "%s\n", name.c_str());
    return twin::Report{};
}
