"""The device's memory: counted, unlike the host's, and full of NaN until something is written."""

from __future__ import annotations

import gc
import io
import os
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F

from tests.device import lab
from tests.engine.jobs import resident_bytes
from tests.engine.models import small_gpt

pytestmark = pytest.mark.on_device


def test_used_and_peak_are_counted() -> None:
    gc.collect()
    before = lab.memory()
    lab.reset_peak_memory_stats()
    one = torch.empty(1000, device=lab.NAME)
    two = torch.empty(500, dtype=torch.bfloat16, device=lab.NAME)
    del one
    after = lab.memory()
    assert (after["used"] - before["used"], after["peak"] - before["used"]) == (1000, 5000)
    assert after["allocations"] - before["allocations"] == 2
    lab.reset_peak_memory_stats()
    assert lab.max_memory_allocated() == lab.memory_allocated() == before["used"] + two.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_fresh_memory_is_poisoned(dtype: torch.dtype) -> None:
    assert torch.empty(7, dtype=dtype, device=lab.NAME).isnan().all()


def test_large_memory_is_poisoned_and_not_there_until_it_is_written() -> None:
    before = resident_bytes()
    large = torch.empty(1 << 28, device=lab.NAME)
    assert large[[0, 1 << 22, (1 << 28) - 1]].isnan().all()
    large[1 << 27].fill_(1)
    assert large[1 << 27].item() == 1 and large[(1 << 27) + 1].isnan()
    assert resident_bytes() - before < 64 << 20


def test_what_does_not_fit_is_refused() -> None:
    _, capacity = lab.mem_get_info()
    lab.set_capacity(lab.memory_allocated() + 4096)
    try:
        held = torch.empty(1024, device=lab.NAME)
        with pytest.raises(torch.OutOfMemoryError, match="do not fit"):
            torch.empty(1, device=lab.NAME)
        assert held.nbytes == 4096
    finally:
        lab.set_capacity(capacity)


def test_numpy_does_not_read_it() -> None:
    with pytest.raises(TypeError, match="can't convert"):
        torch.ones(2, device=lab.NAME).numpy()


def test_views_and_storages_share_addresses() -> None:
    whole = torch.arange(12.0, device=lab.NAME)
    part = whole[3:9].view(2, 3)
    assert part.data_ptr() == whole.data_ptr() + 12
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    part.t().fill_(7)
    assert whole.tolist() == [0, 1, 2, *[7] * 6, 9, 10, 11]
    held = whole.untyped_storage()
    held.resize_(16)
    assert whole[:4].tolist() == [0, 1, 2, 7]
    held.resize_(0)
    assert held.nbytes() == 0


def test_operators_refuse_tensors_of_the_host() -> None:
    here = torch.ones(3, device=lab.NAME)
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([here, torch.ones(3)])
    with pytest.raises(RuntimeError, match="same device"):
        here.add_(torch.ones(3))
    assert (here + torch.tensor(1.0)).tolist() == [2, 2, 2], "a number may lie on the host"
    assert here[torch.tensor([0, 1])].tolist() == [1, 1], "and so may indices"


def test_pinned_memory_is_told_apart() -> None:
    before = lab.memory()["pinned"]
    held = torch.empty(100, pin_memory=True)
    assert held.is_pinned() and held[50:].is_pinned() and not torch.empty(100).is_pinned()
    assert lab.memory()["pinned"] - before == 400
    del held
    assert lab.memory()["pinned"] == before


def test_a_model_computes_what_it_does_on_the_host() -> None:
    inputs = torch.arange(12).view(2, 6)
    found = []
    for device in ("cpu", lab.NAME):
        model = small_gpt()
        first = model.scale
        model.to(device)
        assert model.scale is first and model.out.weight is model.words.weight
        loss = model(inputs.to(device), inputs.to(device))
        loss.backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        optimizer.step()
        found.append([loss.item(), *(held.detach().cpu() for held in trained)])
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1:], found[1][1:], strict=True))


def test_hooks_of_autograd_run_in_a_thread_of_the_device() -> None:
    threads = []
    weight = torch.ones(3, device=lab.NAME, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: threads.append(threading.get_ident()))
    (weight * 2).sum().backward()
    assert threads and threads[0] != threading.get_ident()


def test_its_random_stream_is_its_own() -> None:
    torch.manual_seed(5)
    on_host = [torch.rand(3), torch.rand(3)]
    torch.manual_seed(5)
    first = torch.rand(3)
    drawn = torch.rand(3, device=lab.NAME)
    dropped = F.dropout(torch.ones(40, device=lab.NAME), 0.5)
    assert torch.equal(first, on_host[0]) and torch.equal(torch.rand(3), on_host[1]), "the host's goes on as if alone"
    lab.manual_seed(5)
    assert torch.equal(torch.rand(3, device=lab.NAME), drawn)
    state = lab.get_rng_state()
    assert torch.equal(F.dropout(torch.ones(40, device=lab.NAME), 0.5), dropped)
    lab.set_rng_state(state)
    assert torch.equal(F.dropout(torch.ones(40, device=lab.NAME), 0.5), dropped)
    own = torch.Generator(lab.NAME).manual_seed(5)
    assert torch.equal(torch.rand(3, device=lab.NAME, generator=own), drawn)


def test_files_remember_the_device() -> None:
    file = io.BytesIO()
    torch.save(torch.ones(2, device=lab.NAME), file)
    file.seek(0)
    assert torch.load(file).device == torch.device(lab.NAME, 0)
    file.seek(0)
    assert torch.load(file, map_location="cpu").device == torch.device("cpu")
    assert pickle.loads(pickle.dumps(torch.arange(3, device=lab.NAME))).tolist() == [0, 1, 2]


def test_autocast_computes_in_16_bits() -> None:
    layer = torch.nn.Linear(4, 4, device=lab.NAME)
    with torch.autocast(lab.NAME, dtype=torch.bfloat16):
        assert layer(torch.ones(2, 4, device=lab.NAME)).dtype == torch.bfloat16


def test_a_forked_process_cannot_use_it() -> None:
    held = torch.ones(1, device=lab.NAME)
    child = os.fork()
    if child == 0:
        try:
            torch.empty(1, device=lab.NAME)
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert held.item() == 1
