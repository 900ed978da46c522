"""Pipelines of diffusers: built from the models that their constructors are annotated with, and run for two steps."""

from __future__ import annotations

import string
import typing
from typing import Any

import torch

from pasa.eval.models.zoo import diffusion, language
from pasa.eval.models.zoo.inputs import parameters, required
from pasa.eval.models.zoo.judging import Case
from pasa.eval.models.zoo.pipeline_fields import ANY_OF, CALL, CALLS, FIELDS, TEXT

LEFT_OUT = ("safety_checker", "feature_extractor", "image_encoder", "watermarker", "image_processor")
"""Components that a pipeline can do without."""
NEEDED = ("transformer",)
"""Components that no pipeline runs without, though their default is None."""
ANY_SCHEDULER = ("KarrasDiffusionSchedulers", "SchedulerMixin")
OUTPUTS = ("images", "frames", "audios", "image_embeds", "depth")


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a small pipeline and what it is called with; raises what its parts, or a call of it, raise."""
    import diffusers

    cls = getattr(diffusers, name)
    torch.manual_seed(0)
    known = parameters(cls.__init__)
    components: dict[str, Any] = {part: None for part in LEFT_OUT if part in known}
    if "requires_safety_checker" in known:
        components["requires_safety_checker"] = False
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
        extra = [each.get(kind.__name__, {}) for word, each in FIELDS.items() if word in pipeline]
        fields = {name: value for each in extra for name, value in each.items()}
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
    if not isinstance(annotation, str) and name not in ANY_OF:
        return annotation
    name = ANY_OF.get(name, name)
    return next((getattr(each, name) for each in (diffusers, transformers) if hasattr(each, name)), annotation)


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
