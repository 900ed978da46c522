// How the launches of the binding run on the CPU twin: a test names a deviation in the environment.
#pragma once

#include "../../../ascend_c/kernel/port.h"

#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>

namespace pasa {

inline twin::Options FakeDevice()
{
    using D = twin::Deviation;
    static const std::map<std::string, D> names = {
        {"exp", D::exp},
        {"ln", D::ln},
        {"div", D::div},
        {"sum_order", D::sum_order},
        {"tail_rows", D::tail_rows},
        {"fixpipe_rows", D::fixpipe_rows},
        {"fill", D::fill},
        {"overflow_mode", D::overflow_mode},
        {"integers", D::integers},
        {"compare_bits", D::compare_bits},
        {"compare_nan", D::compare_nan},
        {"accumulator", D::accumulator},
        {"scalar_cache", D::scalar_cache},
        {"sync_all", D::sync_all},
        {"no_saturation", D::no_saturation},
        {"float_saturation", D::float_saturation},
        {"float_sums", D::float_sums},
        {"stored_infinities", D::stored_infinities},
        {"half_rounding", D::half_rounding},
        {"subnormal_results", D::subnormal_results},
        {"subnormal_operands", D::subnormal_operands},
        {"l0c_fractals", D::l0c_fractals},
        {"l1_gaps", D::l1_gaps},
        {"launch_order", D::launch_order},
    };
    twin::Options options;
    const char* name = std::getenv("FAKE_DEVIATION");
    const auto found = names.find(name == nullptr ? "" : name);
    if (found != names.end()) options.deviation = found->second;
    return options;
}

inline void Require(const twin::Report& report)
{
    if (!report.ok) throw std::runtime_error(report.json());
}

}  // namespace pasa
