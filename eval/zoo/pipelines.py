"""Pipelines of diffusers: built from the models that their constructors are annotated with, and run for two steps."""

from __future__ import annotations

import inspect
import string
import typing
from collections.abc import Callable
from typing import Any

import torch

from pasa.eval.zoo import diffusion, language
from pasa.eval.zoo.inputs import parameters
from pasa.eval.zoo.judging import Case, line
from pasa.eval.zoo.pipeline_fields import CALLS, FIELDS

PIPELINES = "diffusers pipeline"
PIXELS, STEPS, TEXT = 64, 2, 77
LEFT_OUT = ("safety_checker", "feature_extractor", "image_encoder", "watermarker", "image_processor")
"""Components that a pipeline can do without."""


def pipelines() -> list[str]:
    """Names of diffusers' pipeline classes."""
    import diffusers

    found = dict.fromkeys(diffusers._import_structure["pipelines"])
    classes = {name: getattr(diffusers, name, None) for name in found}
    base = diffusers.DiffusionPipeline
    return [
        name for name, cls in classes.items() if isinstance(cls, type) and issubclass(cls, base) and cls is not base
    ]


def build(name: str) -> tuple[Any, dict[str, Any]] | str:
    """A small pipeline, and what it is called with; why not, if it cannot be built or run."""
    import diffusers

    cls = getattr(diffusers, name)
    torch.manual_seed(0)
    components: dict[str, Any] = {}
    for part, each in parameters(cls.__init__).items():
        if part in LEFT_OUT:
            components[part] = None
        elif each.default is inspect.Parameter.empty:
            try:
                components[part] = component(each.annotation, name)
            except Exception as error:
                return f"{part}: {type(error).__name__}: {line(error)[:150]}"
    if "requires_safety_checker" in parameters(cls.__init__):
        components["requires_safety_checker"] = False
    try:
        pipeline = cls(**components)
        pipeline.set_progress_bar_config(disable=True)
        given = arguments(cls)
        pipeline(**given)
    except Exception as error:
        return f"{type(error).__name__}: {line(error)[:200]}"
    return pipeline, given


def component(annotation: Any, pipeline: str) -> Any:
    """A small part of this kind; the first kind that can be made, where there is a choice."""
    kinds = [named(each) for each in typing.get_args(annotation) or (annotation,)]
    for kind in kinds:
        for suits, make in MAKERS:
            if suits(kind):
                return make(kind, **fields(kind, pipeline))
    raise NotImplementedError(f"no small {getattr(kinds[0], '__name__', kinds[0])} is known")


def named(annotation: Any) -> Any:
    """The class that a constructor's text names, or what it is annotated with."""
    import diffusers
    import transformers

    if not isinstance(annotation, str):
        return annotation
    return next((getattr(each, annotation) for each in (diffusers, transformers) if hasattr(each, annotation)), annotation)


def fields(kind: type, pipeline: str) -> dict[str, Any]:
    """What a part of this kind needs beside the rules, in this pipeline."""
    found: dict[str, Any] = {}
    for word, own in FIELDS.items():
        if word in pipeline:
            found |= own.get(kind.__name__, {})
    return found


def is_a(library: str, *bases: str) -> Callable[[Any], bool]:
    """Whether a kind is one of these classes of a library, or below one."""

    def suits(kind: Any) -> bool:
        found = tuple(getattr(__import__(library), name) for name in bases)
        return isinstance(kind, type) and issubclass(kind, found)

    return suits


def scheduler(kind: Any, **fields: Any) -> Any:
    """Of this class; where any of the usual ones will do, DDIM's."""
    import diffusers

    usual = kind.__name__ in ("KarrasDiffusionSchedulers", "SchedulerMixin")
    return diffusers.DDIMScheduler() if usual else kind(**fields)


SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
PAD, START, END, UNKNOWN = range(4)


def tokenizer(kind: Any, **fields: Any) -> Any:
    """One for characters, whatever the class: a vocabulary of words would be a file of a hub."""
    import tokenizers
    import transformers

    vocabulary = {each: place for place, each in enumerate((*SPECIAL, *string.printable))}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=SPECIAL[UNKNOWN]))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    ends = [(SPECIAL[each], each) for each in (START, END)]
    split.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, model_max_length=TEXT, chat_template=CHAT,
        **dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True)),
    )  # fmt: skip


CHAT = "{% for message in messages %}{{ message.content if message.content is string else message.content[-1].text }}{% endfor %}"

MAKERS: tuple[tuple[Callable[[Any], bool], Callable[..., Any]], ...] = (
    (lambda kind: "Scheduler" in getattr(kind, "__name__", ""), scheduler),
    (is_a("transformers", "PreTrainedTokenizerBase", "AutoTokenizer"), tokenizer),
    (is_a("transformers", "PreTrainedModel"), language.small_model),
    (is_a("diffusers", "ModelMixin"), diffusion.small_model),
)
"""What makes a component, by what it is."""


def arguments(cls: Any) -> dict[str, Any]:
    """What a pipeline is called with, of what it takes."""
    picture = torch.rand(1, 3, PIXELS, PIXELS)
    known = parameters(cls.__call__)
    given: dict[str, Any] = {
        "prompt": "a cat on a mat", "num_inference_steps": STEPS, "output_type": "np", "height": PIXELS,
        "width": PIXELS, "image": picture, "control_image": picture, "num_frames": 2,
        "mask_image": torch.ones(1, 1, PIXELS, PIXELS), "max_sequence_length": 32,
        "conditioning_frames": [picture[0]] * 2, "strength": 0.8, "batch_size": 1,
    }  # fmt: skip
    for word, own in CALLS.items():
        if word in cls.__name__:
            given |= own
    return {name: value for name, value in given.items() if name in known}


def cases(pipeline: Any, given: dict[str, Any]) -> list[Case]:
    """One call."""

    def call() -> Any:
        own = dict(given)
        if "generator" in parameters(type(pipeline).__call__):
            own["generator"] = torch.Generator().manual_seed(0)
        done = pipeline(**own)
        found = [getattr(done, name, None) for name in ("images", "frames", "audios", "image_embeds", "depth")]
        return [torch.as_tensor(each) for each in found if each is not None]

    return [Case("two steps", call)]
