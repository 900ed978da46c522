"""Pipelines of diffusers: built from the models that their constructors are annotated with, and run for two steps."""

from __future__ import annotations

import re
import string
import typing
from typing import Any

import torch

from pasa.eval.models.zoo import diffusion, language
from pasa.eval.models.zoo.building import FIELDS, parameters, required
from pasa.eval.models.zoo.judging import Case

WIDTH = 64  # of text encoders, as the rules make them
PIXELS, TEXT = 64, 77
LEFT_OUT = dict.fromkeys(("safety_checker", "feature_extractor", "image_encoder", "watermarker", "image_processor"))
LEFT_OUT |= {"requires_safety_checker": False}
"""Components that a pipeline can do without."""
NEEDED = ("transformer",)  # components that no pipeline runs without, though their default is None
ANY_SCHEDULER = ("KarrasDiffusionSchedulers", "SchedulerMixin")
OUTPUTS = ("images", "frames", "audios", "image_embeds", "depth")
PICTURE = torch.linspace(0, 1, 3 * PIXELS * PIXELS).sin().reshape(1, 3, PIXELS, PIXELS)
CALL: dict[str, Any] = {
    "prompt": "a cat on a mat", "num_inference_steps": 2, "output_type": "np", "height": PIXELS, "width": PIXELS,
    "image": PICTURE, "control_image": PICTURE, "num_frames": 2, "mask_image": torch.ones(1, 1, PIXELS, PIXELS),
    "max_sequence_length": 32, "conditioning_frames": [PICTURE[0]] * 2, "strength": 0.8, "batch_size": 1,
    "use_resolution_binning": False, "_auto_resize": False, "max_area": PIXELS * PIXELS,
}  # fmt: skip
"""What pipelines are called with, of what they take."""
CALLS: dict[str, dict[str, Any]] = {
    "AttendAndExcite": {"token_indices": [2]},
    "CogVideoX": {"max_sequence_length": 7},
    "Flux2Klein": {"text_encoder_out_layers": (0, 1, 2)},
    "KandinskyV22": dict.fromkeys(("image_embeds", "negative_image_embeds"), torch.linspace(-1, 1, WIDTH)[None]),
    "LongCatAudio": {"audio_duration_s": 0.1},  # of a longer sound the decoder amplifies what FP32 rounds
}
"""What pipelines whose names hold a word are called with beside that."""

ANY_OF = {"PreTrainedModel": "Qwen3Model", "Gemma2PreTrainedModel": "Gemma2Model", "GemmaPreTrainedModel": "GemmaModel"}
"""A class for components that are annotated with a base class, which cannot be built."""


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a small pipeline and what it is called with; raises what its parts, or a call of it, raise."""
    import diffusers

    cls = getattr(diffusers, name)
    torch.manual_seed(0)
    known = parameters(cls.__init__)
    components = {part: value for part, value in LEFT_OUT.items() if part in known}
    for part in known:
        if part not in components and part in (*required(known), *NEEDED):
            components[part] = component(known[part].annotation, name)
    pipeline = cls(**components)
    pipeline.set_progress_bar_config(disable=True)
    call = dict(CALL)
    for word, extra in CALLS.items():
        call |= extra if word in name else {}
    call = {option: value for option, value in call.items() if option in parameters(cls.__call__)}
    pipeline(**call)
    return pipeline, call


def component(annotation: Any, pipeline: str) -> Any:
    """Return a small component of the annotated class; of the first that can be made, where there is a choice."""
    import diffusers
    import transformers

    kinds = [resolved(each) for each in typing.get_args(annotation) or (annotation,)]
    for kind in (each for each in kinds if isinstance(each, type)):
        fields: dict[str, Any] = {}
        for pipelines, classes, values in FIELDS["pipelines"]:
            if re.search(pipelines, pipeline) and re.fullmatch(classes, kind.__name__):
                fields |= values
        if "Scheduler" in kind.__name__:  # where any of the usual ones will do, DDIM's
            return diffusers.DDIMScheduler() if kind.__name__ in ANY_SCHEDULER else kind()
        if issubclass(kind, (transformers.PreTrainedTokenizerBase, transformers.AutoTokenizer)):
            return tokenizer()
        if issubclass(kind, transformers.PreTrainedModel):
            return language.small_model(kind, **fields)
        if issubclass(kind, diffusers.ModelMixin):
            return diffusion.small_model(kind, **fields)
    raise NotImplementedError(f"no small {getattr(kinds[0], '__name__', kinds[0])} is known")


def resolved(annotation: Any) -> Any:
    """Return the class that an annotation means: some are texts, and some a base class of many."""
    import diffusers
    import transformers

    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    name = ANY_OF.get(name, name if isinstance(annotation, str) else "")
    return getattr(diffusers, name, None) or getattr(transformers, name, annotation)


SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
CHAT = """{% for each in messages %}{% if each.content is string %}{{ each.content }}{% else %}
{{ each.content[-1].text }}{% endif %}{% endfor %}"""


def tokenizer() -> Any:
    """Return a tokenizer for characters: the vocabulary of a real one is a file of a hub."""
    import tokenizers
    import transformers

    vocabulary = {each: place for place, each in enumerate((*SPECIAL, *string.printable))}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    split.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(each, vocabulary[each]) for each in ("<s>", "</s>")]
    )
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, model_max_length=TEXT, chat_template=CHAT, **names
    )


def cases(pipeline: Any, call: dict[str, Any]) -> list[Case]:
    """Return one call."""
    seeded = "generator" in parameters(type(pipeline).__call__)

    def run() -> Any:
        generator = {"generator": torch.Generator().manual_seed(0)} if seeded else {}
        done = pipeline(**call, **generator)
        return [torch.as_tensor(each) for name in OUTPUTS if (each := getattr(done, name, None)) is not None]

    return [Case("two steps", run)]
