"""Tests of the guard of policy="auto" on a GPU, where reading a count on the host would wait for the device."""

import pytest
import torch

import pasa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_it_counts_and_waits_for_nothing(tiny):
    """The guard counts calls with grown weights, and none of its operations synchronises with the host."""
    model = tiny("llama").half().cuda()
    x = torch.randn(1, 5, 64, device="cuda", dtype=torch.float16)

    def project():
        """Run only the projections, which the guard hooks, because the rest of a model may synchronise."""
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj(x), layer.self_attn.k_proj(x)

    with pasa.patch_pipeline(model, policy="auto") as handle:
        with torch.no_grad():
            for side in ("q_proj", "k_proj"):
                getattr(model.model.layers[1].self_attn, side).weight.fill_(60000)
        project()  # the first call allocates pinned memory
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.warns(UserWarning, match=r"model\.layers\.1\.self_attn was left unpatched"):
                project()
            project()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [name for name, _ in handle.report().alarms] == ["model.layers.1.self_attn"]
        counts = {one.name: int(one.count) for one in handle._guard._watched}
        assert counts == {"model.layers.0.self_attn": 0, "model.layers.1.self_attn": 3}
