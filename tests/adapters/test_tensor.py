"""The tensor axis: what every rank holds as predicted and as AutoTP deals it, and children made anew in place."""

from __future__ import annotations

import copy
import gc
import os
import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as td
from deepspeed.checkpoint.affine import ParamAffineMap
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject import set_autotp_mode
from deepspeed.module_inject.layers import is_autotp_training_mode
from deepspeed.utils import groups
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from ds_dynatrain.adapters.groups.worlds import (
    LaunchWorld,
    WorldSpec,
    build_world,
    drop,
    install,
    installed,
    launch_store,
    stand_in_world,
)
from ds_dynatrain.adapters.model.auto_tp import TensorShaper, partition
from ds_dynatrain.adapters.model.shaper import copied, template_of
from ds_dynatrain.adapters.model.shaping import Children
from ds_dynatrain.adapters.versions.torch_versions import attends_without_heads
from ds_dynatrain.errors import LayoutError, UnsupportedError
from ds_dynatrain.space import WHOLE, AxisCuts, DimCut, Layout
from tests.engine.language_models import MODELS, tokens, transformers
from tests.engine.models import Block, SmallGPT
from tests.engine.pool import RankPool

SECONDS = 20.0
BATCH = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": 10**9}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def layout(size: int, stage: int = 0) -> Layout:
    """A layout of the tensor axis alone."""
    return Layout(zero_stage=stage, tensor=size)


def sliced(full: torch.Tensor, cut: AxisCuts, rank: int) -> torch.Tensor:
    """What of a whole tensor a rank of the tensor axis holds, piece by piece."""
    if cut.tensor is None:
        return full
    shard = cut.tensor.shard(tuple(full.shape), rank)
    local = torch.full(shard.shape, torch.nan, dtype=full.dtype)
    for piece in shard.pieces:
        part = full[tuple(map(slice, piece.box.start, piece.box.stop))]
        local.as_strided(part.shape, piece.strides, piece.offset).copy_(part)
    return local


@contextmanager
def world_of(size: int, name: str) -> Iterator[int | None]:
    """A real world of the tensor axis alone on the first `size` ranks, in the block; this one's rank, None outside."""
    launch = LaunchWorld.current()
    if launch.member < size:
        store, members = PrefixStore(name, launch_store()), range(size)
        world = build_world(store, WorldSpec(1, launch.member, members, members, layout(size)), SECONDS)
        install(world)
        try:
            yield world.rank
        finally:
            set_autotp_mode(training=False)
            launch.install()
            drop(world).join()
    else:
        yield None
    td.barrier()


@contextmanager
def stand_in(rank: int, size: int) -> Iterator[None]:
    """A world of the tensor axis without peers, in the block."""
    with installed(stand_in_world(rank, layout(size)), LaunchWorld.current()):
        yield


def reshape(root: nn.Module, shaper: TensorShaper, size: int) -> Children:
    """What an engine does with its module; returns what it goes back to if the switch fails."""
    before = Children.of(root)
    shaper.reshape(root, layout(size))
    before.pass_on(root, is_resized=True)
    return before


def plain(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module that can be compared."""
    kinds = (bool, int, float, str, tuple, type(None))
    return {key: value for key, value in vars(module).items() if isinstance(value, kinds)}


def leaves_ranks_empty(shaper: TensorShaper, size: int) -> bool:
    """Whether some rank has none of a parameter's elements."""
    blocks = [cut.tensor.blocks for cut in shaper._described(size).values() if isinstance(cut.tensor, DimCut)]
    return any(0 in map(sum, zip(*each, strict=True)) for each in blocks)


def cuts_of(shaper: TensorShaper, size: int) -> Mapping[str, AxisCuts]:
    """Its cuts, also where the installed torch could not train with them."""
    is_refused = size > 1 and not attends_without_heads() and leaves_ranks_empty(shaper, size)
    return shaper._described(size) if is_refused else shaper.cuts(layout(size))


def same_as_stock(name: str, size: int) -> None:
    """Parts are those of DeepSpeed's own engine, bit for bit; a reshaped module computes what that engine computes."""
    model = MODELS[name]()
    full = {key: held.detach().clone() for key, held in model.named_parameters()}
    shaper = TensorShaper.of(model, {})
    if leaves_ranks_empty(shaper, size) and not attends_without_heads():
        with pytest.raises(LayoutError, match=f"torch {re.escape(torch.__version__)} .* needs elements on every rank"):
            shaper.cuts(layout(size))
        return
    cuts = shaper.cuts(layout(size))
    assert list(cuts) == list(full)
    groups_before = set(c10d._world.pg_map)
    with world_of(size, f"{name} {size}") as rank:
        if rank is None:
            return
        root = MODELS[name]()
        reshape(root, shaper, size)
        config = {**BATCH, **SGD, "tensor_parallel": {"autotp_size": size}}
        engine, *_ = deepspeed.initialize(model=model, config=config)
        pairs = zip(model.named_parameters(), root.named_parameters(), strict=True)
        for (key, stock), (mine, ours) in pairs:
            assert key == mine and stock.shape == ours.shape and type(ours) is nn.Parameter
            assert torch.equal(stock, sliced(full[key], cuts[key], rank)), key
            assert getattr(stock, "tensor_model_parallel", False) == getattr(ours, "tensor_model_parallel", False)
            ours.data.copy_(stock)
        for (key, stock_part), (mine, our_part) in zip(model.named_modules(), root.named_modules(), strict=True):
            assert (key, type(stock_part), plain(stock_part)) == (mine, type(our_part), plain(our_part))
        for step in range(2):
            batch = {"input_ids": tokens(step), "labels": tokens(step)}
            expected, found = engine(**batch).loss, root(**batch).loss
            assert torch.equal(expected, found)
            engine.backward(expected)
            found.backward()
        for (key, stock), ours in zip(model.named_parameters(), root.parameters(), strict=True):
            assert torch.equal(stock.grad, ours.grad), key
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
        engine.destroy()
        del engine, stock, ours, stock_part, our_part, model, root
    gc.collect()
    assert set(c10d._world.pg_map) == groups_before


NAMES = ["llama", "llama of 4 kv", "llama tied", "qwen2", "qwen3", "mistral", "neox"]
SIZES = (2, 3, 4)
CASES = [
    pytest.param(name, size, marks=() if place % 3 == number else pytest.mark.full)
    for place, name in enumerate(NAMES)
    for number, size in enumerate(SIZES)
]
"""Each model by one size, and all of them in the full set."""


@pytest.mark.parametrize(("name", "size"), CASES)
def test_parts_and_modules_are_those_of_autotp(pool: RankPool, name: str, size: int) -> None:
    pool.run(same_as_stock, name=name, size=size)


# ---- asking ---------------------------------------------------------------------------------------------------------


def as_described() -> None:
    """For any size, with no peer: the cuts are those of DeepSpeed's own maps, and nothing of DeepSpeed's is changed."""
    before = (set(c10d._world.pg_map), groups._TENSOR_MODEL_PARALLEL_GROUP, is_autotp_training_mode())
    for name in NAMES[td.get_rank() :: td.get_world_size()]:
        model = MODELS[name]()
        template, shaper = template_of(model), TensorShaper.of(model, {})
        full = {key: held.detach() for key, held in model.named_parameters()}
        assert set(shaper.cuts(layout(1)).values()) == {WHOLE}
        for size in (2, 3, 5, 8):
            found = cuts_of(shaper, size)
            made = copied(template)
            partition(made, {}, size, size - 1)
            for key, held in made.named_parameters():
                written = getattr(held, DS_AUTOTP_UC_META, None)
                described = written and written["conversion"].get("affine_map")
                if described is None:
                    assert written is None and found[key] == WHOLE
                    continue
                whole = ParamAffineMap.from_dict(described)
                for rank in range(size):
                    assert torch.equal(whole.extract(full[key], rank), sliced(full[key], found[key], rank)), key
    assert before == (set(c10d._world.pg_map), groups._TENSOR_MODEL_PARALLEL_GROUP, is_autotp_training_mode())


def test_cuts_of_any_size_are_asked_without_peers(pool: RankPool) -> None:
    pool.run(as_described)


HALVES = {
    "layer_specs": [
        {"patterns": [r".*\.up\.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
        {"patterns": [r".*\.down\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.mix\.weight$"], "partition_type": "skip"},
    ]
}


def own_rules() -> None:
    """The user's own rules for a model of his own: sub-parameters, unequal parts, and what is left whole."""
    model = nn.ModuleList([Block(8, 14, 0.0)])
    config = {"tensor_parallel": {"autotp_size": 4, "partition_config": HALVES}}
    found = TensorShaper.of(model, config).cuts(layout(3))
    assert found["0.up.weight"].tensor == found["0.up.bias"].tensor == DimCut(0, ((3, 2, 2), (3, 2, 2)))
    assert found["0.down.weight"].tensor == DimCut(1, ((5, 5, 4),))
    assert {key for key, cut in found.items() if cut == WHOLE} == {
        *("0.norm.weight", "0.norm.bias", "0.mix.weight", "0.down.bias")
    }


def test_rules_of_the_user_are_followed(pool: RankPool) -> None:
    pool.run(own_rules)


SQUARE = {"layer_specs": [{"patterns": [r".*\.attn\.c_proj\.weight$"], "partition_type": "column"}]}


def refusals() -> None:
    """What cannot be cut, with the parameter or the model, the arithmetic and the nearest size."""
    kv = r"tensor=4: .*q_proj.weight' would be cut into 16 \+ 16 \+ 0 \+ 0, and zero_stage=3 needs .*nearest: tensor=2$"
    overlap = {"tensor_parallel": {"tp_overlap_comm": True}}
    nearest = 50 if attends_without_heads() else 2
    tied = rf"tensor=51: .*vocabulary.*51.*nearest: tensor={nearest}$"
    impossible: list[tuple[str, dict[str, Any], Layout, str]] = [
        ("llama", {}, layout(4, 3), kv),
        ("llama", overlap, layout(3), r"16 \+ 16 \+ 0, and tp_overlap_comm needs .*nearest: tensor=2$"),
        ("llama tied", {"tensor_parallel": {"vocab_parallel_lm_head": True}}, layout(51), tied),
    ]
    for name, config, wanted, words in impossible:
        with pytest.raises(LayoutError, match=words):
            TensorShaper.of(MODELS[name](), config).cuts(wanted)
    none = {"layer_specs": [{"patterns": ["nothing"], "partition_type": "row"}]}
    sliced_words = {"layer_specs": [{"patterns": [r".*words\.weight$"], "partition_type": "row"}]}
    cannot: list[tuple[nn.Module, dict[str, Any], str]] = [
        (MODELS["gpt2"](), {}, "AutoTP cannot cut GPT2LMHeadModel: AutoTP not supported for model"),
        (MODELS["gpt2"](), {"partition_config": SQUARE}, "'transformer.h.0.attn.c_proj' is a Conv1D"),
        (MODELS["bloom"](), {"preset_model": "bloom"}, "tensor parallelism of BloomForCausalLM: AutoTP cuts its fused"),
        (MODELS["llama"](), {"partition_config": none}, "cut none of the \\d+ parameters; .*leave layout.tensor at 1"),
        (SmallGPT(), {"partition_config": sliced_words}, "'words.weight'|meta"),
    ]
    for model, block, words in cannot:
        with pytest.raises(UnsupportedError, match=words):
            TensorShaper.of(model, {"tensor_parallel": block}).cuts(layout(2))
    locked = nn.Linear(2, 2)
    locked.lock = threading.Lock()
    with pytest.raises(UnsupportedError, match="a template of Linear cannot be made: 'lock'"):
        TensorShaper.of(locked, {}).cuts(layout(2))
    with pytest.raises(LayoutError, match=r"pipe=2 .*no pipeline stages and no experts"):
        TensorShaper.of(SmallGPT(), {}).cuts(Layout(zero_stage=0, pipe=2))


def test_what_cannot_be_cut_is_refused(pool: RankPool) -> None:
    pool.run(refusals)


def test_the_size_of_a_layout_is_that_of_the_configuration() -> None:
    own = {"train_batch_size": 4, "tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2, "tp_grain_size": 4}}}
    shaper = TensorShaper.of(nn.Linear(2, 2), own)
    for size, written in ((4, 4), (1, 0)):
        config = copy.deepcopy(own)
        shaper.configure(config, layout(size))
        assert config["tensor_parallel"] == {"autotp_size": written, "tp": {"tp_grain_size": 4}}
    none: dict[str, Any] = {}
    shaper.configure(none, layout(1))
    assert none == {}


# ---- in place -------------------------------------------------------------------------------------------------------


def in_place() -> None:
    """Buffers, hooks, modes, flags and ties go along; a roll-back brings all of it back; nothing old is left."""
    root = MODELS["llama tied"]()
    shaper = TensorShaper.of(root, {})
    calls: list[str] = []
    handle = root.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: calls.append("up"))
    root.register_forward_pre_hook(lambda *_: calls.append("root"))
    root.model.layers[1].eval()
    rotary = root.model.rotary_emb.inv_freq
    rotary.add_(1.0)
    root.to(torch.bfloat16)
    root.model.rotary_emb.inv_freq = rotary
    loss, config = root.loss_function, root.generation_config
    before, whole = Children.of(root), dict(root.named_parameters())
    gone = weakref.ref(root.model.layers[0].mlp.up_proj)
    for rank, size in ((1, 2), (3, 4), (0, 1), (2, 3)):
        with stand_in(rank, size):
            reshape(root, shaper, size)
        found, made = cuts_of(shaper, size), dict(root.named_parameters())
        assert list(made) == list(whole) and not {*map(id, made.values())} & {*map(id, whole.values())}
        for key, held in made.items():
            full = torch.empty(whole[key].shape, device="meta")
            assert held.shape == sliced(torch.zeros(full.shape), found[key], rank).shape, key
            assert (held.dtype, held.device.type) == (torch.bfloat16, "cpu")
        assert root.lm_head.weight is root.model.embed_tokens.weight
        assert root.model.rotary_emb.inv_freq is rotary and root.generation_config is config
        modes = {name for name, part in root.named_modules() if not part.training}
        assert modes and all(name.startswith("model.layers.1") for name in modes)
        assert (root.loss_function is loss) == (size == 1) and hasattr(root, "ds_autotp_parsed") == (size > 1)
        root.model.layers[0].mlp.up_proj(torch.zeros(1, 32, dtype=torch.bfloat16))
        assert calls.pop() == "up" and not calls and len(root._forward_pre_hooks) == 1
    handle.remove()
    root.model.layers[0].mlp.up_proj(torch.zeros(1, 32, dtype=torch.bfloat16))
    assert not calls, "the user's handle is good for the new module"
    before.put_back(root)
    assert root.model.layers[0].mlp.up_proj is gone() and root.loss_function is loss
    assert dict(root.named_parameters()) == whole and not hasattr(root, "ds_autotp_parsed")
    with stand_in(1, 2):
        reshape(root, shaper, 2)
    del before, whole, held, made
    gc.collect()
    assert gone() is None


def test_children_are_made_anew_in_place(pool: RankPool) -> None:
    pool.run(in_place)


def hooked() -> None:
    """Gradients of replicated norms are still added up, hooks that a module puts on itself are its heir's."""
    root = MODELS["qwen3"]()
    attention = root.model.layers[0].self_attn
    attention.register_forward_pre_hook(MethodType(_note, attention))
    shaper = TensorShaper.of(root, {})
    with stand_in(0, 2):
        reshape(root, shaper, 2)
        made = root.model.layers[0].self_attn
        assert made is not attention and len(made.q_norm.weight._backward_hooks) == 1
        assert not made.q_proj.weight._backward_hooks
        (hook,) = made._forward_pre_hooks.values()
        assert hook.__self__ is made and next(iter(attention._forward_pre_hooks.values())).__self__ is attention


def _note(*_: Any) -> None:
    """A hook."""


def test_hooks_are_where_they_belong(pool: RankPool) -> None:
    pool.run(hooked)


def small_memory() -> tuple[int, int]:
    """(bytes of the whole model, bytes that became resident while it was asked about and given this rank's part)."""
    with torch.device("meta"):
        root = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, vocab_size=1 << 15)
        )
    for part in root.modules():
        for key, buffer in part._buffers.items():
            part._buffers[key] = torch.zeros(buffer.shape)
    shaper, whole = TensorShaper.of(root, {}), sum(held.nbytes for held in root.parameters())
    before = _resident()
    cuts_of(shaper, 64)
    with stand_in(5, 8):
        reshape(root, shaper, 8)
    return whole, _resident() - before


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_no_full_size_memory_is_touched(pool: RankPool) -> None:
    for whole, grown in pool.run(small_memory):
        assert grown < whole / 16
