// The only place that knows whether a kernel is compiled for the device or for the CPU twin.
#pragma once

#ifdef PASA_CPU_TWIN
#include "../twin/kernel_operator.h"
#else
#include "kernel_operator.h"
#endif

#include "../tiling/tiling.h"
