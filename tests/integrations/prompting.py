"""Prompts, completions that follow from them, and rewards: what jobs of GRPOTrainer are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.integrations import trainers

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(trainers.WORDS - 3))]
GENERATIONS = 3


def tokenizer() -> PreTrainedTokenizerFast:
    """Of words that are known."""
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def words(seed: int, count: int) -> str:
    """So many words."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{number}" for number in torch.randint(0, 40, (count,), generator=generator).tolist())


def prompts(count: int = 40) -> Dataset:
    """Prompts of one length: TRL pads a rank's prompts on the left, and GPT-2 counts positions from there."""
    return Dataset.from_list([{"prompt": words(number, 4)} for number in range(count)])


def answered(asked: Sequence[str], trainer: Any) -> dict[str, Any]:
    """Return completions that follow from the prompt and the number of its copy, and not from a rank's random stream.

    TRL asks a function of this kind in place of generating. `asked` begins with the first copy of a prompt, or goes on
    with a later one.
    """
    known, found = trainer.processing_class, []
    first = trainer.accelerator.process_index * len(asked)
    for place, prompt in enumerate(asked, first):
        generator = torch.Generator().manual_seed(sum(map(ord, prompt)) + place % GENERATIONS)
        found.append(torch.randint(3, 40, (2 + int(place % GENERATIONS),), generator=generator).tolist())
    ids = [known(prompt)["input_ids"] for prompt in asked]
    return {"prompt_ids": ids, "completion_ids": found, "logprobs": [[0.0] * len(each) for each in found]}


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    """Return how many different letters a completion has."""
    return [float(len(set(completion))) for completion in completions]
