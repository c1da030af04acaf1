"""TRL's trainers over a world that changes: texts, packed texts, pairs with a reference model, adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Trainer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.engine.pool import RankPool
from tests.integrations import trainers

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(trainers.WORDS - 3))]
BLOCK = {"layout": {"data": 2}}
SCHEDULE = {2: {"data": 4, "zero_stage": 2}, 4: {"data": 3, "zero_stage": 1}}


def tokenizer() -> PreTrainedTokenizerFast:
    """Of words that are known."""
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def words(seed: int, count: int) -> str:
    """So many words."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{number}" for number in torch.randint(0, 40, (count,), generator=generator).tolist())


def texts(count: int = 48) -> Dataset:
    """Of different lengths."""
    return Dataset.from_list([{"text": words(number, 4 + number % 9)} for number in range(count)])


def pairs(count: int = 48) -> Dataset:
    """A prompt, and an answer that is better than another."""
    rows = [{"prompt": words(n, 4), "chosen": words(n + 100, 5), "rejected": words(n + 200, 3)} for n in range(count)]
    return Dataset.from_list(rows)


def run(folder: Path, block: Any, kind: type[Trainer], of: type[Any], data: Dataset, **more: Any) -> dict[str, Any]:
    """A job of one of TRL's trainers; of: its configuration, which takes the rest but `peft`, `schedule`, `resume`."""
    peft, schedule, resume = more.pop("peft", None), more.pop("schedule", None), more.pop("resume", None)
    trainers.allow_ranks()
    trainers.forget_ranks()
    args = trainers.arguments(folder, block, kind=of, **{"max_steps": 6, "bf16": False, **more})
    made: Any = kind if block is None else trainers.elastic(kind)
    callbacks = [] if schedule is None else [trainers.SwitchCallback(schedule)]
    given: dict[str, Any] = {} if peft is None else {"peft_config": peft}
    if kind is DPOTrainer:
        given["ref_model"] = trainers.model()
    trainer = made(
        model=trainers.model(),
        args=args,
        train_dataset=data,
        processing_class=tokenizer(),
        callbacks=callbacks,
        **given,
    )
    return trainers.carried_out(trainer, resume)


def sft(folder: Path, block: Any, **more: Any) -> dict[str, Any]:
    """SFTTrainer."""
    return run(folder, block, SFTTrainer, SFTConfig, texts(), max_length=16, **more)


def lora(folder: Path, block: Any, **more: Any) -> dict[str, Any]:
    """With adapters."""
    return sft(folder, block, peft=LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"), **more)


def dpo(folder: Path, block: Any, **more: Any) -> dict[str, Any]:
    """DPOTrainer, with the model of the start as reference."""
    return run(folder, block, DPOTrainer, DPOConfig, pairs(), max_length=16, **more)


def losses(answers: Sequence[Any]) -> list[float]:
    """That rank 0 has logged."""
    found = next(answer for answer in answers if answer["rank"] == 0 and "let go" not in answer)
    return [row["loss"] for row in found["log"] if "loss" in row]


@pytest.mark.parametrize(
    "job", [sft, pytest.param(dpo, marks=pytest.mark.full), pytest.param(lora, marks=pytest.mark.full)]
)
def test_they_train_as_stock_does(four: RankPool, alone: RankPool, tmp_path: Path, job: Any) -> None:
    """2 -> 4 -> 3 ranks against one rank of the stock trainer."""
    stock = losses(alone.run(job, folder=tmp_path / "stock", block=None, gradient_accumulation_steps=4, seconds=120))
    answers = four.run(
        job, folder=tmp_path / "ours", block=BLOCK, schedule=SCHEDULE, gradient_accumulation_steps=2, seconds=180
    )
    assert losses(answers) == pytest.approx(stock, rel=2e-5) and len(stock) == 6


@pytest.mark.full
def test_packed_texts(four: RankPool, alone: RankPool, tmp_path: Path) -> None:
    more = {"packing": True, "packing_strategy": "wrapped"}
    stock = losses(
        alone.run(sft, folder=tmp_path / "stock", block=None, gradient_accumulation_steps=4, **more, seconds=120)
    )
    ours = {"block": BLOCK, "schedule": SCHEDULE, "gradient_accumulation_steps": 2}
    assert losses(four.run(sft, folder=tmp_path / "ours", **ours, **more, seconds=180)) == pytest.approx(
        stock, rel=2e-5
    )


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_of_a_stock_trainer_go_on_in_another_world(four: RankPool, tmp_path: Path, stage: int) -> None:
    """Saved on 4 ranks without the frozen weights, which the base model has."""
    saves = {"save_strategy": "steps", "save_steps": 3, "stage": stage}
    whole = four.run(lora, folder=tmp_path, block=None, **saves, seconds=120)
    for file in (tmp_path / "checkpoint-3").glob("global_step3/*model_states.pt"):
        said = torch.load(file, map_location="cpu", weights_only=False)
        assert not said["frozen_param_fragments"]
        assert not any("attn.c_attn.base_layer" in name for name in said["module"])
    resume = {"resume": str(tmp_path / "checkpoint-3"), "config": {"train_batch_size": 12}}
    again = four.run(lora, folder=tmp_path / "again", block=BLOCK, **resume, seconds=180)
    assert losses(again) == pytest.approx(losses(whole), rel=2e-5) and len(losses(again)) == 6


@pytest.mark.full
def test_adapters_alone_are_saved(four: RankPool, tmp_path: Path) -> None:
    """In the files of the model, after a change of world too; and it goes on from there in yet another one."""
    saves = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    whole = four.run(lora, folder=tmp_path, block=BLOCK, schedule={2: {"data": 3}}, **saves, seconds=180)
    for step in (3, 6):
        names = load_file(tmp_path / f"checkpoint-{step}" / "adapter_model.safetensors")
        assert names and all("lora_" in name for name in names)
        assert not (tmp_path / f"checkpoint-{step}" / "model.safetensors").exists()
    config = {"config": {"train_batch_size": 12}, "resume": str(tmp_path / "checkpoint-3")}
    again = four.run(lora, folder=tmp_path / "again", block={"layout": {"data": 4}}, **config, seconds=180)
    assert losses(again) == pytest.approx(losses(whole), rel=2e-5)
