"""Pipelines of diffusers: built from the models that their constructors are annotated with, and run for two steps."""

from __future__ import annotations

import importlib
import inspect
import string
import typing
from collections.abc import Callable
from typing import Any

import torch

from pasa.eval.models.zoo import diffusion, language
from pasa.eval.models.zoo.inputs import parameters
from pasa.eval.models.zoo.judging import Case, line
from pasa.eval.models.zoo.pipeline_fields import ANY_OF, CALLS, FIELDS

PIPELINES = "diffusers pipeline"
PIXELS, STEPS, TEXT = 64, 2, 77
LEFT_OUT = ("safety_checker", "feature_extractor", "image_encoder", "watermarker", "image_processor")
"""Components that a pipeline can do without."""
NEEDED = ("transformer",)
"""Components that no pipeline runs without, though their default is None."""


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
        elif each.default is inspect.Parameter.empty or part in NEEDED:
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
    """Return a small component of the annotated class; of the first that can be made, where there is a choice."""
    kinds = [named(each) for each in typing.get_args(annotation) or (annotation,)]
    for kind in kinds:
        for suits, make in MAKERS:
            if suits(kind):
                return make(kind, **fields(kind, pipeline))
    raise NotImplementedError(f"no small {getattr(kinds[0], '__name__', kinds[0])} is known")


def named(annotation: Any) -> Any:
    """Return the class that an annotation means: some are texts, and some a base class of many."""
    import diffusers
    import transformers

    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if not isinstance(annotation, str) and name not in ANY_OF:
        return annotation
    name = ANY_OF.get(name, name)
    return next((getattr(each, name) for each in (diffusers, transformers) if hasattr(each, name)), annotation)


def fields(kind: type, pipeline: str) -> dict[str, Any]:
    """Return the arguments that a component of this class needs beside the rules, in this pipeline."""
    found: dict[str, Any] = {}
    for word, own in FIELDS.items():
        if word in pipeline:
            found |= own.get(kind.__name__, {})
    return found


def is_a(library: str, *bases: str) -> Callable[[Any], bool]:
    """Make a test for classes of a library and those below them; the library is imported when it is asked."""

    def suits(kind: Any) -> bool:
        found = tuple(getattr(importlib.import_module(library), name) for name in bases)
        return isinstance(kind, type) and issubclass(kind, found)

    return suits


def scheduler(kind: Any) -> Any:
    """Return a scheduler of this class; where any of the usual ones will do, DDIM's."""
    import diffusers

    usual = kind.__name__ in ("KarrasDiffusionSchedulers", "SchedulerMixin")
    return diffusers.DDIMScheduler() if usual else kind()


SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
CHAT = """{% for each in messages %}{% if each.content is string %}{{ each.content }}{% else %}
{{ each.content[-1].text }}{% endif %}{% endfor %}"""


def tokenizer(kind: Any) -> Any:
    """Return a tokenizer for characters, whatever the class: the vocabulary of a real one is a file of a hub."""
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


MAKERS: tuple[tuple[Callable[[Any], bool], Callable[..., Any]], ...] = (
    (lambda kind: "Scheduler" in getattr(kind, "__name__", ""), scheduler),
    (is_a("transformers", "PreTrainedTokenizerBase", "AutoTokenizer"), tokenizer),
    (is_a("transformers", "PreTrainedModel"), language.small_model),
    (is_a("diffusers", "ModelMixin"), diffusion.small_model),
)
"""What makes a component, by the library's class that it is below."""


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
