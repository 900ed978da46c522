"""Select the attention modules of a transformers model that PASA can patch, with reasons for the others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from pasa.patching.handle import no_model, nothing_to_patch
from pasa.patching.transformers_attention import forward_names

if TYPE_CHECKING:
    from pasa.patching import Policy

WRITTEN_OUT: dict[str, tuple[str, ...]] = {
    "big_bird": ("BigBirdSelfAttention",),
    "blip": ("BlipAttention",),
    "blip_text": ("BlipTextSelfAttention",),
    "bloom": ("BloomAttention",),
    "bros": ("BrosSelfAttention",),
    "canine": ("CanineSelfAttention",),
    "codegen": ("CodeGenAttention",),
    "convbert": ("ConvBertSelfAttention",),
    "cpmant": ("CpmAntAttention",),
    "cvt": ("CvtSelfAttention",),
    "data2vec_vision": ("Data2VecVisionSdpaSelfAttention",),
    "deberta": ("DisentangledSelfAttention",),
    "deberta_v2": ("DisentangledSelfAttention",),
    "donut_swin": ("DonutSwinSelfAttention",),
    "falcon": ("FalconAttention",),
    "fastspeech2_conformer": ("FastSpeech2ConformerAttention",),
    "flaubert": ("MultiHeadAttention",),
    "flava": ("FlavaSelfAttention",),
    "fsmt": ("Attention",),
    "glpn": ("GLPNEfficientSelfAttention",),
    "gpt_neo": ("GPTNeoSelfAttention",),
    "gpt_neox_japanese": ("GPTNeoXJapaneseAttention",),
    "gptj": ("GPTJAttention",),
    "hiera": ("HieraMaskUnitAttention",),
    "imagegpt": ("ImageGPTAttention",),
    "luke": ("LukeSelfAttention",),
    "maskformer_swin": ("MaskFormerSwinSelfAttention",),
    "megatron_bert": ("MegatronBertSelfAttention",),
    "mgp_str": ("MgpstrAttention",),
    "mpnet": ("MPNetSelfAttention",),
    "mpt": ("MptAttention",),
    "mvp": ("MvpAttention",),
    "pvt_v2": ("PvtV2SelfAttention",),
    "rembert": ("RemBertSelfAttention",),
    "roformer": ("RoFormerSelfAttention",),
    "sam": ("SamVisionSdpaAttention",),
    "sam_hq": ("SamHQVisionSdpaAttention",),
    "sew_d": ("DisentangledSelfAttention",),
    "speecht5": ("SpeechT5Attention",),
    "squeezebert": ("SqueezeBertSelfAttention",),
    "swinv2": ("Swinv2SelfAttention",),
    "tapas": ("TapasSelfAttention",),
    "timesformer": ("TimesformerSelfAttention",),
    "trocr": ("TrOCRAttention",),
    "vilt": ("ViltSelfAttention",),
    "visual_bert": ("VisualBertSelfAttention",),
    "vitdet": ("VitDetAttention",),
    "xglm": ("XGLMAttention",),
    "xlm": ("MultiHeadAttention",),
    "xlnet": ("XLNetRelativeAttention",),
}
"""Modules that compute attention themselves and that `written_out.py` can follow, by the file that defines them.

`pasa eval zoo` judges a model of each. Others are no softmax of scores (Reformer, YOSO, MRA, RWKV, Autoformer,
SwiftFormer), use scores or weights for more than attention, or call torch's own attention module (WavLM).
"""


def select(
    root: torch.nn.Module, policy: Policy
) -> tuple[list[PreTrainedModel], dict[str, torch.nn.Module], list[tuple[str, str]]]:
    """Return the models below `root`, their attention modules to patch, and (name, reason) pairs of the others.

    Raises
    ------
    TypeError
        There is no transformers model.
    NotImplementedError
        Nothing can be patched.
    """
    owners = [module for module in root.modules() if isinstance(module, PreTrainedModel)]
    if not owners:
        raise no_model(root)
    selected: dict[str, torch.nn.Module] = {}
    skipped: list[tuple[str, str]] = []
    for name, reason in unreachable(root):
        module = root.get_submodule(name)
        if not is_written_out(module):
            skipped.append((name, reason))
        elif callable(policy) and not policy(name, module):
            skipped.append((name, "declined by the policy"))
        else:
            selected[name] = module
    configs = {id(owner.config) for owner in owners}
    for name, module in root.named_modules():
        if not uses_interface(module):
            continue
        if id(module.config) not in configs:
            skipped.append((name, "no model here makes its masks from this module's config"))
        elif callable(policy) and not policy(name, module):
            skipped.append((name, "declined by the policy"))
        else:
            selected[name] = module
    if not selected:
        raise nothing_to_patch(root, skipped)
    return owners, selected, skipped


def uses_interface(module: torch.nn.Module) -> bool:
    """Return whether `module.forward` gets its attention from transformers' registry, by the name of that global."""
    return "ALL_ATTENTION_FUNCTIONS" in forward_names(module) and hasattr(module, "config")


def is_written_out(module: torch.nn.Module) -> bool:
    """Return whether PASA can follow the attention that this module of transformers computes itself.

    A later transformers may take the same class's attention from the registry: CodeGen's and GPT-J's since 5.24.
    """
    if uses_interface(module):
        return False
    kind = type(module)
    folder, _, file = kind.__module__.rpartition(".modeling_")
    return folder.startswith("transformers.models.") and kind.__name__ in WRITTEN_OUT.get(file, ())


def unreachable(root: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of attention modules that compute attention themselves and cannot be patched.

    They are recognised by their class name. Modules that contain other attention modules are left out.
    """
    for name, module in root.named_modules():
        inner = any(is_named_attention(type(child)) or uses_interface(child) for child in _descendants(module))
        if is_named_attention(type(module)) and not inner and not uses_interface(module):
            yield name, f"{type(module).__name__} computes its attention itself, not through AttentionInterface"


def is_named_attention(kind: type) -> bool:
    """Return whether a class is one of attention, by its name."""
    return re.search(r"Attention(V?\d+)?$|Attn$", kind.__name__) is not None


def _descendants(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (child for child in module.modules() if child is not module)
