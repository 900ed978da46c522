"""Random programs of operators: whatever the equations leave free can be scaled, and FP64 sees no difference.

The oracle knows no rule. It scales what the trace says may be scaled, by random powers of two, and runs the program in
FP64. All values of the program are compared, not its last one alone.
"""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from pasa.fp16.conversion import Conversion
from pasa.fp16.planning import Plan, _collect, denominators
from tests.pasa.fp16.planned import scale

ROWS, WIDTH, PARAMETERS, LENGTH = 4, 6, 5, 9
TOLERANCE = 1e-12
LARGEST_POWER = 6


def written(first, second):
    """Write a part of a tensor into a copy of another."""
    copy = first.clone()
    copy[1:3] = second[1:3]
    return copy


def into_zeros(first, second):
    """Fill memory that was zero from two tensors."""
    memory = torch.zeros(ROWS, 2 * WIDTH, dtype=first.dtype)
    memory[:, :WIDTH] = first
    memory[:, WIDTH:] = second
    return memory[:, 3:-3]


def multiplied(first, second):
    """Change a tensor through its memory, and read it through a view that is older."""
    copy = first.clone()
    view = copy.t()
    copy.mul_(second)
    return view.t()


def attended(query, key, value):
    heads = [each.reshape(1, 2, ROWS, WIDTH // 2) for each in (query, key, value)]
    return functional.scaled_dot_product_attention(*heads).reshape(ROWS, WIDTH)


ORDER = torch.tensor([3, 1, 0, 5, 4, 2])
UNARY = {
    "negated": lambda m, x: -x,
    "magnitude": lambda m, x: x.abs(),
    "relu": lambda m, x: torch.relu(x),
    "leaky relu": lambda m, x: functional.leaky_relu(x),
    "gelu": lambda m, x: functional.gelu(x),
    "tanh": lambda m, x: torch.tanh(x),
    "exponential": lambda m, x: torch.exp(-x.abs()),
    "softmax": lambda m, x: x.softmax(-1),
    "root": lambda m, x: x.abs().sqrt(),
    "inverse root": lambda m, x: (x * x).rsqrt(),
    "square": lambda m, x: x.square(),
    "cube": lambda m, x: x**3,
    "third root": lambda m, x: x.abs() ** (1 / 3),
    "reciprocal": lambda m, x: x.reciprocal(),
    "times 3": lambda m, x: x * 3,
    "over 3": lambda m, x: x / 3,
    "rounded quotient": lambda m, x: torch.div(x, 3, rounding_mode="floor"),
    "plus 1": lambda m, x: x + 1,
    "1 minus": lambda m, x: 1 - x,
    "at least 0": lambda m, x: x.clamp(min=0),
    "at most 1": lambda m, x: x.clamp(max=1),
    "wide": lambda m, x: x.double().to(x.dtype),
    "whole": lambda m, x: x.to(torch.int64).to(x.dtype),
    "sum": lambda m, x: x.sum(-1, keepdim=True).expand(ROWS, WIDTH),
    "mean": lambda m, x: x.mean(0, keepdim=True) + torch.zeros_like(x),
    "maximum": lambda m, x: x.amax(-1, keepdim=True).expand(ROWS, WIDTH),
    "variance": lambda m, x: x.var(-1, keepdim=True).expand(ROWS, WIDTH),
    "deviation": lambda m, x: x.std(-1, keepdim=True).expand(ROWS, WIDTH),
    "length": lambda m, x: torch.linalg.vector_norm(x, dim=-1, keepdim=True).expand(ROWS, WIDTH),
    "count": lambda m, x: torch.linalg.vector_norm(x, ord=0, dim=-1, keepdim=True).expand(ROWS, WIDTH),
    "running sum": lambda m, x: x.cumsum(-1),
    "sorted": lambda m, x: x.sort(-1).values,
    "largest": lambda m, x: x.topk(WIDTH, -1).values,
    "place of the largest": lambda m, x: x.argmax(-1, keepdim=True).to(x.dtype).expand(ROWS, WIDTH),
    "sign": lambda m, x: x.sign(),
    "reordered": lambda m, x: x[:, ORDER],
    "rolled": lambda m, x: x.roll(1, 0),
    "turned": lambda m, x: x.t().contiguous().t(),
    "triangle": lambda m, x: x.tril(),
    "padded": lambda m, x: functional.pad(x[:, 1:-1], (1, 1)),
    "padded by 2": lambda m, x: functional.pad(x[:, 1:-1], (1, 1), value=2.0),
    "masked": lambda m, x: x.masked_fill(x > 0, 0),
    "masked by 5": lambda m, x: x.masked_fill(x > 0, 5.0),
    "compared with 1": lambda m, x: x * (x > 1),
    "direction": lambda m, x: functional.normalize(x, dim=-1),
    "layer norm": lambda m, x: functional.layer_norm(x, (WIDTH,), eps=m.eps),
    "layer norm of another epsilon": lambda m, x: functional.layer_norm(x, (WIDTH,), eps=0.3),
    "RMS norm": lambda m, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + m.eps),
    "group norm": lambda m, x: functional.group_norm(x, 2, eps=m.eps),
    "batch norm": lambda m, x: functional.batch_norm(x, m.means, torch.ones(WIDTH, dtype=x.dtype)),
    "linear": lambda m, x: functional.linear(x, m.matrix, m.bias),
    "gated": lambda m, x: (lambda gate, up: torch.sigmoid(gate) * up)(*functional.linear(x, m.fused).chunk(2, -1)),
    "halves": lambda m, x: (lambda one, other: one * other)(*functional.linear(x, m.fused).chunk(2, -1)),
    "plus a parameter and 1": lambda m, x: x * (1 + m.offset),
    "convolution": lambda m, x: functional.conv1d(x[None], m.kernel, m.kernel_bias, padding=1)[0],
}
BINARY = {
    "sum": lambda m, x, y: x + y,
    "difference": lambda m, x, y: x - y,
    "product": lambda m, x, y: x * y,
    "quotient": lambda m, x, y: x / y,
    "larger": lambda m, x, y: torch.maximum(x, y),
    "smaller": lambda m, x, y: torch.min(x, y),
    "either": lambda m, x, y: torch.where(x > y, x, y),
    "joined": lambda m, x, y: torch.cat([x, y], -1)[:, 3:-3],
    "product of matrices": lambda m, x, y: x @ (y.t() @ x),
    "written": lambda m, x, y: written(x, y),
    "into zeros": lambda m, x, y: into_zeros(x, y),
    "multiplied in place": lambda m, x, y: multiplied(x, y),
    "added in place": lambda m, x, y: x.clone().add_(y),
    "product added": lambda m, x, y: torch.addcmul(x, x, y),
    "interpolated": lambda m, x, y: torch.lerp(x, y, 0.3),
    "weight norm": lambda m, x, y: torch._weight_norm(x.clone(), y[:, :1].clone()),
    "attention": lambda m, x, y: attended(x, y, x),
    "values": lambda m, x, y: attended(x / (1 + x.abs().sum()), x / (1 + x.abs().sum()), y),
}


class Program(nn.Module):
    """A sequence of operators; each reads parameters, the input, or results of those before it."""

    def __init__(self, steps):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.steps, self.eps = steps, 0.01
        self.leaves = nn.ParameterList(draw(ROWS, WIDTH) for _ in range(PARAMETERS))
        self.matrix, self.bias, self.fused = draw(WIDTH, WIDTH), draw(WIDTH), draw(2 * WIDTH, WIDTH)
        self.offset, self.means = draw(WIDTH), draw(WIDTH)
        self.kernel, self.kernel_bias = draw(ROWS, ROWS, 3), draw(ROWS)

    def forward(self, x):
        values = [x, *self.leaves]
        for name, places in self.steps:
            operands = [values[place % len(values)] for place in places]
            values.append((UNARY if len(places) == 1 else BINARY)[name](self, *operands))
        return {"hidden_states": values[1 + PARAMETERS :]}


def place(last=PARAMETERS + LENGTH):
    return st.integers(0, last)


STEP = st.one_of(
    st.tuples(st.sampled_from(sorted(UNARY)), st.tuples(place())),
    st.tuples(st.sampled_from(sorted(BINARY)), st.tuples(place(), place())),
)


def traced(model, x):
    """Return the trace of a program in BF16, as `to_fp16` makes it."""
    conversion = Conversion({"": model}, lambda: model(x=x.to(model.matrix.dtype)), 4.0)
    try:
        tracer = conversion._first_trace()
        cuts = conversion._partitions(tracer)
        return conversion._trace(cuts) if cuts else tracer
    finally:
        conversion.restore()


def scaled_by_chance(tracer, draw):
    """Return a plan with random powers of two for all that the equations leave free."""
    steps = denominators(tracer)
    free = [unknown for unknown in range(len(tracer.equations.names)) if unknown not in tracer.equations.solved]
    plan = Plan(values={unknown: draw() * steps.get(unknown, 1) for unknown in free})
    _collect(tracer, plan)
    return plan


def difference(result, truth):
    """Return the largest relative difference; what is infinite or NaN in the truth must be so in the result."""
    finite = truth.isfinite()
    if not torch.equal(finite, result.isfinite()):
        return math.inf
    largest = truth[finite].abs().max().item() if finite.any() else 0.0
    return (result - truth)[finite].abs().max().item() / largest if largest else 0.0


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(STEP, min_size=2, max_size=LENGTH), st.data())
def test_what_the_equations_leave_free_changes_nothing_in_fp64(steps, data):
    model = Program(steps).eval()
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tracer = traced(model, x)
    plan = scaled_by_chance(tracer, lambda: data.draw(st.integers(-LARGEST_POWER, LARGEST_POWER)))
    with torch.no_grad():
        truths = [each.clone() for each in model(x=x)["hidden_states"]]  # a parameter may be among them
        scale(model, plan)
        results = model(x=x * 2.0 ** -plan.inputs.get("", {}).get("['x']", 0))["hidden_states"]
    for index, (result, truth) in enumerate(zip(results, truths, strict=True)):
        power = plan.outputs.get("", {}).get(f"['hidden_states'][{index}]", 0)
        assert difference(result * 2.0**power, truth) <= TOLERANCE, (index, steps[index])
