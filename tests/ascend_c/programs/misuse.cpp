// Runs the snippets of misuse_*.cpp.
#include "misuse_310p.cpp"
#include "misuse_arguments.cpp"
#include "misuse_objects.cpp"
#include "misuse_order.cpp"
#include "misuse_places.cpp"

TWIN_CASE(snippet)
{
    twin::Device device;
    std::vector<half> x(4096, half(1));
    x.back() = std::numeric_limits<float>::quiet_NaN();
    half* gx = device.input("x", x);
    float* gz = device.output<float>("z", 4096);
    const misuse::Snippet& snippet = misuse::snippets().at(arguments.text("name"));
    twin::Options options = arguments.options();
    options.shape = snippet.shape;
    if (snippet.options) snippet.options(arguments.number("bug") != 0, options);
    return device.launch(arguments.text("name"), 2, options, [&] {
        if (GetBlockIdx() == 0 || arguments.text("name").rfind("cross_core", 0) == 0)
            snippet.run(arguments.number("bug") != 0, gx, gz);
    });
}

TWIN_CASE(blocks)
{
    twin::Options options;
    return twin::Device().launch("blocks", arguments.number("n"), options, [] {});
}
