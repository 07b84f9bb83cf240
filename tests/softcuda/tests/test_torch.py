"""The unmodified CUDA wheel of PyTorch on the software CUDA."""

from __future__ import annotations

import pytest
import torch
from isolated import alone


def test_devices_have_properties() -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2
    properties = torch.cuda.get_device_properties(1)
    assert properties.name.startswith("Software CUDA") and properties.total_memory == 4 << 30
    assert torch.cuda.get_device_capability(0) == (9, 0)


def test_tensors_are_copied() -> None:
    values = torch.arange(1000.0)
    there = torch.empty(1000, device="cuda")
    there.copy_(values)
    assert torch.equal(there.cpu(), values)
    assert torch.equal(there.to("cuda:1").cpu(), values)
    assert torch.equal(there.view(10, 100)[3].cpu(), values[300:400])
    assert torch.zeros(1, device="cuda").item() == 0


def test_pinned_memory_streams_and_events_work_together() -> None:
    pinned = torch.arange(1 << 20).pin_memory()
    assert pinned.is_pinned()
    side = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(side):
        start.record()
        there = torch.empty(1 << 20, dtype=torch.int64, device="cuda")
        there.copy_(pinned, non_blocking=True)
        end.record()
    torch.cuda.current_stream().wait_stream(side)
    there.record_stream(torch.cuda.current_stream())
    back = torch.empty(1 << 20, dtype=torch.int64, pin_memory=True)
    back.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, pinned)
    assert end.query() and start.elapsed_time(end) >= 0


def test_the_allocator_counts_caches_and_runs_out() -> None:
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == before + (1 << 20)
    where = tensor.data_ptr()
    del tensor
    assert torch.empty(1 << 20, dtype=torch.uint8, device="cuda").data_ptr() == where
    torch.cuda.empty_cache()
    with pytest.raises(torch.cuda.OutOfMemoryError, match="GPU 0 has a total capacity of 4.00 GiB"):
        torch.empty(5 << 30, dtype=torch.uint8, device="cuda")
    unused, total = torch.cuda.mem_get_info()
    assert 0 < unused <= total == 4 << 30


def a_kernel_without_a_twin() -> None:
    with pytest.raises(torch.AcceleratorError, match="cudaErrorNoKernelImageForDevice"):
        torch.ones(3, device="cuda") + 1
    assert torch.zeros(2, device="cuda").cpu().tolist() == [0, 0]


def test_a_kernel_without_a_twin_is_an_error_that_names_it() -> None:
    assert "has no twin" in alone(a_kernel_without_a_twin).errors


def training() -> None:
    import fallback

    assert fallback.install() > 1000
    torch.manual_seed(1)
    models = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))]
    models.append(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)))
    models[1].load_state_dict(models[0].state_dict())
    models[1].cuda()
    losses: list[list[float]] = [[], []]
    for model, found in zip(models, losses, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        inputs = torch.linspace(-1, 1, 64).reshape(8, 8).to(next(model.parameters()).device)
        for _ in range(3):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert losses[0] == losses[1] and losses[0][0] > losses[0][-1]


def test_operators_fall_back_to_the_cpu_and_train() -> None:
    alone(training)


def random_numbers() -> None:
    import fallback

    fallback.install()
    there, here = torch.cuda.get_rng_state(), torch.get_rng_state()
    first = torch.randn(100, device="cuda")
    # The host's state is not the device's: programs that restore it get other numbers all the same.
    torch.set_rng_state(here)
    second = torch.randn(100, device="cuda")
    assert torch.equal(torch.get_rng_state(), here)
    torch.cuda.set_rng_state(there)
    assert torch.equal(torch.randn(100, device="cuda").cpu(), first.cpu())
    assert not torch.equal(first.cpu(), second.cpu())
    torch.cuda.manual_seed(7)
    assert not torch.equal(torch.randn(100, device="cuda").cpu(), first.cpu())


def test_random_numbers_follow_from_the_state_of_the_device() -> None:
    alone(random_numbers)


def norms() -> None:
    import fallback

    fallback.install()
    values, scale = torch.randn(3, 4, 8), torch.randn(8)
    gradients = []
    for device in ("cpu", "cuda"):
        inputs = [tensor.detach().to(device).requires_grad_() for tensor in (values, scale)]
        torch.nn.functional.rms_norm(inputs[0], (8,), inputs[1]).sin().sum().backward()
        gradients.append([tensor.grad.cpu() for tensor in inputs])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_norms_of_language_models_have_gradients() -> None:
    alone(norms)
