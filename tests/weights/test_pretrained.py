"""Folders that `save_pretrained` writes in any layout: transformers loads them, bit by bit the trainer's weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ds_dynatrain.errors import CheckpointError, WeightsError
from ds_dynatrain.space import Layout
from ds_dynatrain.weights.outputs import ParamMeta, batches
from ds_dynatrain.weights.pretrained import PART, names_of, put_in_place, remove_parts, write_parts
from tests.engine import axis_walks, mixtures
from tests.engine.language_models import transformers
from tests.engine.models import small_gpt
from tests.engine.pool import RankPool
from tests.engine.subjects import language_model, module
from tests.engine.transitions import layout
from tests.weights import cases

TIED, MIXTURE = partial(language_model, "llama tied"), partial(mixtures.autoep, "mixtral")


def saving(engine: Any, subject: axis_walks.Subject, folder: Path, **how: Any) -> cases.Named:
    """Save, and return the weights as the oracle has them."""
    assert engine.save_pretrained(folder / str(engine.layout), **how) == folder / str(engine.layout)
    return cases.expected(engine, subject)


def saving_case(find: cases.Find, path: list[Layout], folder: Path, **how: Any) -> list[cases.Named]:
    """Save in each layout of a path."""
    return cases.at_each(find, "bf16", path, partial(saving, folder=folder, **how))


def loaded(folder: Path) -> Any:
    """The model in a folder; nothing of it may be missing or too much."""
    model, said = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(said.values()), said
    return model


@pytest.mark.parametrize("path", ["d2z3 > d2t2z1", pytest.param("t2z0 > d2t2z3 > d4z2", marks=pytest.mark.full)])
def test_transformers_loads_it(pool: RankPool, tmp_path: Path, path: str) -> None:
    layouts = [layout(short) for short in path.split(" > ")]
    states = pool.run(saving_case, find=TIED, path=layouts, folder=tmp_path, max_shard_bytes=4000, seconds=120)[0]
    for at, wanted in zip(layouts, states, strict=True):
        folder = tmp_path / str(at)
        assert (folder / "model.safetensors.index.json").is_file()
        assert len(list(folder.glob("*.safetensors"))) > 3 and not list(folder.glob("*.part"))
        model = loaded(folder)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert cases.differing(dict(model.named_parameters()), wanted) == []


def test_experts_and_one_file(pool: RankPool, tmp_path: Path) -> None:
    states = pool.run(saving_case, find=MIXTURE, path=[layout("d4e4z3")], folder=tmp_path, seconds=120)[0]
    (folder,) = tmp_path.iterdir()
    found = dict(loaded(folder).named_parameters())
    assert [file.name for file in folder.glob("*.safetensors")] == ["model.safetensors"]
    for name, held in states[0].items():
        path, _, last = name.rpartition(".")
        if last in ("w1", "w3"):
            half = found[f"{path}.gate_up_proj"].chunk(2, 1)[last == "w3"]
            assert torch.equal(half.flatten(), held), name
        else:
            theirs = {"w2": f"{path}.down_proj"}.get(last, name.replace("router.gate", "gate"))
            assert torch.equal(found[theirs].flatten(), held), name


def test_another_type(pool: RankPool, tmp_path: Path) -> None:
    how: dict[str, Any] = {"folder": tmp_path, "dtype": torch.float32}
    wanted = pool.run(saving_case, find=TIED, path=[layout("d3z3")], seconds=120, **how)[0][0]
    (folder,) = tmp_path.iterdir()
    found = load_file(folder / "model.safetensors")
    assert cases.differing(found, {name: held.float() for name, held in wanted.items()}) == []


def failing(engine: Any, subject: axis_walks.Subject, folder: Path) -> list[str]:
    """Save into a place where no folder can be."""
    said = []
    for how in ({}, {"dtype": torch.int8}):
        with pytest.raises(WeightsError) as caught:
            engine.save_pretrained(folder / "file" / "below", **how)
        said.append(str(caught.value))
    return said


def failing_case(folder: Path) -> list[Any]:
    """Save where it must fail, and train on."""
    return cases.at_each(TIED, "bf16", [layout("d2z3"), layout("d2z1")], partial(failing, folder=folder))


def test_what_fails_is_said_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for said in pool.run(failing_case, folder=tmp_path)[:2]:
        for disk, dtype in said:
            assert "Not a directory" in disk and "nothing of" in disk
            assert "int8 is not written" in dtype


def buffered_model() -> nn.Module:
    """A model with persistent buffers of two types."""
    model = small_gpt()
    model.register_buffer("bias_of_router", torch.arange(3.0))
    model.register_buffer("seen", torch.tensor(7))
    model.register_buffer("scratch", torch.ones(5), persistent=False)
    return model


def buffered() -> axis_walks.Subject:
    return replace(module(), build=buffered_model)


def buffers_back(engine: Any, subject: axis_walks.Subject, folder: Path) -> dict[str, Any]:
    """Save, change the buffers and load the file again; return the buffers."""
    engine.save_pretrained(folder)
    for held in engine.module.buffers():
        held.add_(1)
    engine.load_weights(load_file(folder / "model.safetensors").items() if engine.rank == 0 else None)
    return {name: held.tolist() for name, held in engine.module.named_buffers()}


def buffers_case(folder: Path) -> list[Any]:
    return cases.at_each(buffered, "bf16", [layout("d2z3")], partial(buffers_back, folder=folder))


def test_persistent_buffers_are_saved_and_loaded(pool: RankPool, tmp_path: Path) -> None:
    for (found,) in pool.run(buffers_case, folder=tmp_path)[:2]:
        assert found["bias_of_router"] == [0, 1, 2] and found["seen"] == 7 and found["scratch"] == [2.0] * 5
    assert load_file(tmp_path / "model.safetensors")["seen"].dtype == torch.int64


def written(folder: Path, count: int, value: float, model: nn.Module | None = None) -> int:
    """Write two tensors into `count` files."""
    metas = [ParamMeta(name, torch.float32, (4,)) for name in ("one", "two")]
    shards = list(batches(metas, lambda meta: meta.nbytes, 32 // count))
    write_parts(folder, shards, (torch.full(meta.shape, value) for meta in metas))
    return put_in_place(folder, shards, model or nn.Linear(1, 1), torch.float32)


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_only_its_own_files_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "model_of_a_user.safetensors").write_text("")
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    for count, files in ((2, shards), (1, ["model.safetensors"]), (2, shards)):
        assert written(tmp_path, count, count) == count
        assert names_in(tmp_path) == sorted([*files, "model_of_a_user.safetensors"])
        assert load_file(tmp_path / files[0])["one"].tolist() == [count] * 4


class Unwritable:
    """A configuration that cannot be written."""

    def save_pretrained(self, folder: Path) -> None:
        raise OSError("no space left")


@pytest.mark.parametrize("elements", [4, 1 << 20])
def test_a_full_disk_is_said(tmp_path: Path, elements: int) -> None:
    """Also where closing the file would fail once more, in another way."""
    metas = [ParamMeta("x", torch.float32, (elements,), ())]
    (tmp_path / f"{names_of([metas])[0]}{PART}").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"No space left on device; nothing of .* was replaced"):
        write_parts(tmp_path, [metas], iter([torch.zeros(elements)]))


def test_messages_say_what_was_replaced(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.config = Unwritable()  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=r"no space left; .* was replaced in part: save again"):
        written(tmp_path, 1, 1, model)
    before = names_in(tmp_path)
    shards, copied = [[ParamMeta("one", torch.float32, (4,))]], torch.empty(4, device="meta")
    with pytest.raises(CheckpointError, match=r"nothing of .* was replaced"):
        write_parts(tmp_path, shards, iter([copied]))  # a copy that fails, as it does without memory
    remove_parts(tmp_path, shards)
    assert names_in(tmp_path) == before
