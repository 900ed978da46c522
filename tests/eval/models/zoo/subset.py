"""Architectures that every run of the tests judges: each way of attending, masking and refusing, once."""

CAUSAL = (
    "Qwen2ForCausalLM",  # grouped queries
    "LlamaForCausalLM",
    "MistralForCausalLM",  # a window
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",  # soft-capped: refused
    "Gemma3ForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "FalconForCausalLM",  # computes its attention itself: refused
    "OPTForCausalLM",
    "MixtralForCausalLM",
    "DeepseekV3ForCausalLM",  # values of another width
    "GptOssForCausalLM",  # sinks: refused
    "Phi3ForCausalLM",
)
BASE = (
    "BigBirdPegasusModel",  # these five were wrong once: decoders saw the future, or a mask of another form
    "NllbMoeModel",
    "PegasusXModel",
    "InformerModel",
    "BridgeTowerModel",
    "BertModel",
    "ModernBertModel",  # a window in both directions
    "CLIPModel",
    "SiglipVisionModel",
    "ViTModel",
    "UniSpeechModel",
    "HubertModel",
    "T5Model",  # a position bias: refused
    "MambaModel",  # no attention
)
SEQUENCE = (
    "BartForConditionalGeneration",
    "MBartForConditionalGeneration",
    "M2M100ForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "BigBirdPegasusForConditionalGeneration",
)
DIFFUSERS = (
    "UNet2DConditionModel",
    "AutoencoderKL",
    "FluxTransformer2DModel",
    "WanTransformer3DModel",
    "PixArtTransformer2DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",  # its processor is not known: refused
)
PIPELINES = ("StableDiffusionControlNetImg2ImgPipeline",)
NAMES = (CAUSAL, BASE, SEQUENCE, DIFFUSERS, PIPELINES)
REFUSED = {
    "FalconForCausalLM": "computes its attention itself",
    "Gemma2ForCausalLM": "softcap",
    "GptOssForCausalLM": "s_aux",
    "T5Model": "position_bias",
    "SD3Transformer2DModel": "JointAttnProcessor2_0",
}
WITHOUT_ATTENTION = ("MambaModel",)
