// One wrong call at a time. Where things lie: memory that is full, of another core or position, not aligned, or not there.
#include "misuse.h"

namespace misuse {

static const Register places({
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
          DataCopy(in(0, 1024), x, bug ? 63 : 64);
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
          DataCopy(in(0, 1024), x[bug ? 4032 : 4000], 96);
      }}},
    {"gm_foreign",
     {aiv,
      [](bool bug, half* gx, float*) {
          static half outside[16];
          GlobalTensor<half> x;
          x.SetGlobalBuffer(bug ? outside : gx, 16);
      }}},
    {"event_on_wrong_core",
     {aiv,
      [](bool bug, half*, float*) {
          if (bug) SetFlag<HardEvent::MTE1_M>(0);
      }}},
    {"event_pair",
     {aiv,
      [](bool bug, half*, float*) {
          if (bug) SetFlag<HardEvent::MTE2_MTE1>(0);
      }}},
    {"copy_position",
     {aiv,
      [](bool bug, half* gx, float*) {
          GlobalTensor<half> x;
          x.SetGlobalBuffer(gx, 4096);
          DataCopy(bug ? ub(0, 64) : in(0, 64), x, 64);
      }}},
    {"no_memory",
     {aiv,
      [](bool bug, half*, float*) {
          LocalTensor<half> x = some_input(), nowhere;
          Adds(bug ? nowhere : x, x, half(1), 64);
      }}},
    {"position_on_core",
     {aiv, [](bool bug, half*, float*) { LocalTensor<half>(bug ? TPosition::A1 : TPosition::VECIN, 0, 64); }}},
    {"queue_on_core",
     {aiv,
      [](bool bug, half*, float*) {
          TPipe pipe;
          TBuf<TPosition::VECIN> here;
          TBuf<TPosition::A1> elsewhere;
          if (bug) pipe.InitBuffer(elsewhere, 64);
          else pipe.InitBuffer(here, 64);
      }}},
    {"tensor_capacity",
     {aiv,
      [](bool bug, half*, float*) { LocalTensor<half>(TPosition::VECIN, 180 * 1024, bug ? 4096 : 1024); }}},
    {"select_workspace",
     {aiv,
      [](bool, half*, float*) {
          LocalTensor<half> x = some_input();
          LocalTensor<uint8_t> bits(TPosition::VECCALC, 4096, 32);
          Compares(bits, x, half(1), CMPMODE::GT, 128);
          PipeBarrier<PIPE_V>();
          Select(ub(8192, 128), bits, x, half(0), SELMODE::VSEL_TENSOR_SCALAR_MODE, 128);
      },
      [](bool bug, twin::Options& options) { options.asc_reserved_ubuf = !bug; }}},
    {"gm_tensor_size",
     {aiv,
      [](bool bug, half* gx, float*) {
          GlobalTensor<half> x;
          x.SetGlobalBuffer(gx, bug ? 4097 : 4096);
      }}},
    {"gm_beside",
     {aiv,
      [](bool bug, half* gx, float*) {
          GlobalTensor<half> x;
          x.SetGlobalBuffer(bug ? gx - 1 : gx);
      }}},
    {"buffer_bounds",
     {aiv,
      [](bool bug, half*, float*) {
          TPipe pipe;
          TBuf<TPosition::VECIN> b;
          pipe.InitBuffer(b, 64);
          b.Get<half>(bug ? 33 : 32);
      }}},
    {"too_many_buffers",
     {aiv,
      [](bool bug, half*, float*) {
          TPipe pipe;
          TQue<TPosition::VECIN, 1> q;
          TBuf<TPosition::VECCALC> more;
          pipe.InitBuffer(q, 64, 32);
          if (bug) pipe.InitBuffer(more, 32);
      }}},
    {"sync_all_on_cube",
     {mix,
      [](bool bug, half*, float*) {
          if (bug && ASCEND_IS_AIC) SyncAll();
      }}},
    {"input_written",
     {aiv,
      [](bool bug, half* gx, float* gz) {
          some_input();
          PipeBarrier<PIPE_ALL>();
          GlobalTensor<half> z;
          z.SetGlobalBuffer(bug ? gx : reinterpret_cast<half*>(gz), 1024);
          DataCopy(z, out(0, 1024), 1024);
      }}},
    {"guard",
     {aiv,
      [](bool bug, half*, float* gz) {
          if (bug) gz[4096 + 1] = 0;  // past the end, through the bare pointer
      }}},
});

}  // namespace misuse
