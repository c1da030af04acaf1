"""Hugging Face trainers over a world that changes: `elastic(SFTTrainer)(model=model, args=args, ...)`.

Import this module before `TrainingArguments` are made. If nodes may join and leave, they would otherwise look for a
world of fixed size.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import transformers

from ds_dynatrain.integrations.huggingface.callbacks import SwitchCallback
from ds_dynatrain.integrations.huggingface.calls import install
from ds_dynatrain.integrations.huggingface.names import PROMPTS
from ds_dynatrain.integrations.huggingface.prompts import PROMPTED, PromptMixin
from ds_dynatrain.integrations.huggingface.settings import has_block
from ds_dynatrain.integrations.huggingface.trainer import ElasticMixin
from ds_dynatrain.integrations.shared.names import check

__all__ = ["SwitchCallback", "elastic", "make_trainers_elastic"]

install()

T = TypeVar("T", bound=transformers.Trainer)


def elastic(kind: type[T]) -> type[T]:
    """Return a class like `kind` whose trainers follow the world.

    kind: `transformers.Trainer`, or one of its subclasses.

    The DeepSpeed configuration needs a `dynatrain` block. The class's constructor raises UnsupportedError, naming the
    feature, for features that cannot follow a world.
    """
    if issubclass(kind, ElasticMixin):
        return kind
    is_prompted = hasattr(kind, PROMPTED)
    if is_prompted:
        check(PROMPTS, "trl", "transformers")
    mixins = (PromptMixin, ElasticMixin) if is_prompted else (ElasticMixin,)
    made: Any = type(kind.__name__, (*mixins, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    found: type[T] = made
    return found


def make_trainers_elastic() -> None:
    """Make every Trainer made from now on elastic, whatever its class, if its configuration has a `dynatrain` block.

    Meant for scripts that must not be changed; see `python -m ds_dynatrain.run`.
    """
    stock = transformers.Trainer.__init__

    @functools.wraps(stock)
    def begin(trainer: Any, *arguments: Any, **named: Any) -> None:
        given = (*arguments, *named.values())
        if isinstance(trainer, ElasticMixin) or not any(has_block(each) for each in given):
            stock(trainer, *arguments, **named)
            return
        trainer.__class__ = elastic(type(trainer))
        trainer.begin(given)
        stock(trainer, *arguments, **named)
        trainer.finish()

    setattr(transformers.Trainer, "__init__", begin)  # noqa: B010
