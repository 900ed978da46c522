// What every test program shares: named cases, arguments, raw arrays from and to files, a JSON report on standard
// output.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kernel_operator.h"

namespace harness {

// `main CASE key=value ...`; arrays are files in the folder `data`.
struct Arguments {
    std::map<std::string, std::string> values;

    std::string text(const std::string& key, const std::string& otherwise = "") const
    {
        const auto found = values.find(key);
        return found == values.end() ? otherwise : found->second;
    }
    int number(const std::string& key, int otherwise = 0) const
    {
        return std::atoi(text(key, std::to_string(otherwise)).c_str());
    }
    twin::Options options() const
    {
        twin::Options o;
        o.mode = text("mode", "eager") == "deferred" ? twin::Mode::deferred : twin::Mode::eager;
        o.seed = static_cast<uint64_t>(number("seed"));
        o.overflow = text("overflow", "inf_nan") == "saturate" ? twin::Overflow::saturate : twin::Overflow::inf_nan;
        o.jitter = number("jitter") != 0;
        o.flush_subnormals = number("flush") != 0;
        o.saturate_float = number("saturate_float") != 0;
        o.shape = text("shape", "mix") == "aiv"   ? twin::Shape::aiv_only
                  : text("shape", "mix") == "aic" ? twin::Shape::aic_only
                                                  : twin::Shape::mix_1_2;
        return o;
    }
    template <typename T>
    std::vector<T> load(const std::string& name) const
    {
        std::ifstream file(text("data") + "/" + name + ".bin", std::ios::binary | std::ios::ate);
        std::vector<T> out(static_cast<size_t>(file.tellg()) / sizeof(T));
        file.seekg(0);
        file.read(reinterpret_cast<char*>(out.data()), static_cast<std::streamsize>(out.size() * sizeof(T)));
        return out;
    }
    template <typename T>
    void save(const std::string& name, const T* values_, size_t n) const
    {
        std::ofstream file(text("data") + "/" + name + ".bin", std::ios::binary);
        file.write(reinterpret_cast<const char*>(values_), static_cast<std::streamsize>(n * sizeof(T)));
    }
};

using Case = std::function<twin::Report(const Arguments&)>;

inline std::map<std::string, Case>& cases()
{
    static std::map<std::string, Case> all;
    return all;
}

struct Register {
    Register(const char* name, Case run) { cases()[name] = std::move(run); }
};

}  // namespace harness

#define TWIN_CASE(name)                                                   \
    static twin::Report case_##name(const harness::Arguments& arguments); \
    static const harness::Register register_##name(#name, case_##name);   \
    static twin::Report case_##name([[maybe_unused]] const harness::Arguments& arguments)

// One line per command line on standard input, or the command line itself: many runs cost one process.
inline int run_line(const std::vector<std::string>& words)
{
    harness::Arguments arguments;
    for (size_t i = 1; i < words.size(); ++i) {
        const size_t equals = words[i].find('=');
        arguments.values[words[i].substr(0, equals)] = words[i].substr(equals + 1);
    }
    const auto found = harness::cases().find(words[0]);
    if (found == harness::cases().end()) {
        std::fprintf(stderr, "no case %s\n", words[0].c_str());
        return 2;
    }
    std::printf("%s\n", found->second(arguments).json().c_str());
    return 0;
}

int main(int argc, char** argv)
{
    if (argc > 1) return run_line(std::vector<std::string>(argv + 1, argv + argc));
    int status = 0;
    char line[4096];
    while (status == 0 && std::fgets(line, sizeof(line), stdin) != nullptr) {
        std::vector<std::string> words(1);
        for (const char* c = line; *c != '\0' && *c != '\n'; ++c) {
            if (*c == ' ') {
                words.emplace_back();
            } else {
                words.back() += *c;
            }
        }
        status = run_line(words);
    }
    return status;
}
