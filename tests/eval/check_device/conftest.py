"""torch's attention on a CPU with scores in FP16."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@pytest.fixture
def reduced():
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
