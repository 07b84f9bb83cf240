"""Probes of the backend and of NCCL, through PyTorch: bits of reductions, training, several ranks on a GPU, memory."""

from __future__ import annotations

import os
from ctypes import byref, c_size_t
from datetime import timedelta
from typing import Any

from probing import Found, NotHere, Number, Probe, Ranks, amount, cu, together

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def begin() -> None:
    """Chooses the first device, and on a software CUDA has PyTorch's operators run there."""
    import torch

    torch.cuda.set_device(0)
    if cu.IS_SOFTWARE:
        import fallback

        fallback.install()


def join(ranks: Ranks, backend: str = "ncclx_rs", seconds: float = 20) -> None:
    """Makes the default group of these ranks."""
    import torch.distributed as dist

    dist.init_process_group(
        backend, store=store(ranks), rank=ranks.rank, world_size=ranks.size, timeout=timedelta(seconds=seconds)
    )


def store(ranks: Ranks) -> Any:
    """A store of PyTorch's for these ranks."""
    import torch.distributed as dist

    mine = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks.rank == 0 else None
    port = ranks.all_gather(mine.port if mine is not None else 0)[0]
    return mine if mine is not None else dist.TCPStore("127.0.0.1", port, is_master=False)


def sums(ranks: Ranks, sizes: tuple[int, ...]) -> tuple[int, list[str]]:
    """How many reductions were compared with the CPU's, and those whose bits differ."""
    import torch
    import torch.distributed as dist

    os.environ["NCCLX_RS_ALGORITHM"] = "ring"
    begin()
    join(ranks)
    compared, differ = 0, []
    generator = torch.Generator().manual_seed(ranks.rank)
    for dtype in (getattr(torch, name) for name in DTYPES[: amount(8, 3)]):
        for operation in OPERATIONS:
            if dtype.is_floating_point and operation.startswith("B"):
                continue
            for size in sizes:
                numbers = torch.randint(-128, 128, (size * dtype.itemsize,), generator=generator)
                # Any bits: subnormal numbers, infinities, NaNs too.
                here = numbers.to(torch.int8).view(dtype)
                there = here.cuda()
                for tensor in (here, there):
                    dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
                compared += 1
                if not torch.equal(here.view(torch.int8), there.cpu().view(torch.int8)):
                    differ.append(f"{operation} of {size} {dtype}".replace("torch.", ""))
    dist.destroy_process_group()
    return compared, differ


def p9() -> Found:
    sizes = (0, 1, 15, 16, 17, *([(1 << 20) + 3] if not cu.IS_SOFTWARE else [1003]))
    found = together(sums, 3, sizes, seconds=55)
    differ = sorted({name for _, names in found for name in names})
    numbers: dict[str, Number] = {"compared": found[0][0], "differ": len(differ)}
    if differ:
        numbers["first_that_differ"] = ", ".join(differ[:8])
    return Found(not differ, numbers, not differ)


def by_nccl(ranks: Ranks, several: bool) -> str:
    """What NCCL says to two ranks on one device; nothing if it serves them."""
    import torch
    import torch.distributed as dist

    if several:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    begin()
    join(ranks, "nccl")
    try:
        one = torch.ones(1, device="cuda")
        dist.all_reduce(one)
        torch.cuda.synchronize()
    except RuntimeError as error:
        # The last line is NCCL's own word, where it has one.
        return next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
    return "" if one.item() == 2 else f"a wrong sum: {one.item()}"


def p10() -> Found:
    import torch

    if cu.IS_SOFTWARE:
        raise NotHere("the software CUDA runs no kernels of NCCL")
    if not torch.distributed.is_nccl_available():
        raise NotHere("this PyTorch has no NCCL")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    numbers: dict[str, Number] = {"version": version, "says": said(False)}
    if torch.cuda.nccl.version() >= (2, 30):
        numbers["says_with_multi_rank"] = said(True)
    return Found("" in (numbers["says"], numbers.get("says_with_multi_rank")), numbers)


def said(several: bool) -> str:
    try:
        return str(together(by_nccl, 2, several, seconds=25)[0])
    except RuntimeError as error:
        return str(error).strip().splitlines()[-1]


def losses(ranks: Ranks, expandable: bool) -> list[float]:
    """The losses of a small model under FSDP2, of the plain model on one rank; all ranks have the same data."""
    if expandable:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    begin()
    torch.manual_seed(1)
    parts = [torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)]
    model = torch.nn.Sequential(*parts).cuda()
    batch, target = torch.randn(16, 64).cuda(), torch.randn(16, 64).cuda()
    if ranks.size > 1:
        join(ranks)
        mesh = init_device_mesh("cuda", (ranks.size,))
        for layer in (*parts, model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for _ in range(5):
        loss = ((model(batch) - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    if ranks.size > 1:
        dist.destroy_process_group()
    return found


def p11() -> Found:
    numbers: dict[str, Number] = {}
    reference = together(losses, 1, False, seconds=60)[0]
    for size, expandable in ((2, False), (2, True), (4, False))[: amount(3, 1)]:
        name = f"{size}_ranks{'_expandable' if expandable else ''}_largest_difference"
        numbers[name] = max(
            abs(loss - expected)
            for found in together(losses, size, expandable, seconds=60)
            for loss, expected in zip(found, reference, strict=True)
        )
    right = all(float(difference) < 1e-4 for difference in numbers.values()) and reference[-1] < reference[0]
    return Found(right, numbers, right)


def footprint(ranks: Ranks, groups: int) -> tuple[float, float]:
    """Bytes of the device that all ranks' first communicator takes, with what it needs, and each further one."""
    import torch
    import torch.distributed as dist

    begin()
    one = torch.zeros(1, device="cuda")
    join(ranks)

    def unused() -> int:
        torch.cuda.synchronize()
        ranks.all_gather()
        free, total = c_size_t(), c_size_t()
        cu.cuda.cuMemGetInfo_v2(byref(free), byref(total))
        ranks.all_gather()
        return free.value

    levels = [unused()]
    made = []
    for _ in range(groups):
        made.append(dist.new_group())
        dist.all_gather_into_tensor(torch.zeros(ranks.size, device="cuda"), one, group=made[-1])
        levels.append(unused())
    dist.destroy_process_group()
    return levels[0] - levels[1], (levels[1] - levels[-1]) / (groups - 1)


def p12() -> Found:
    found = together(footprint, 2, 4, seconds=80)
    first, each = (max(values) / 2 / (1 << 20) for values in zip(*found, strict=True))
    numbers: dict[str, bool | int | float | str] = {
        "first_mib_a_rank": round(first, 2),
        "further_mib_a_rank": round(each, 2),
    }
    return Found(round(each, 2), numbers)


PROBES = [
    Probe(
        "P9",
        "Do reductions on the GPU have the bits of the CPU's, by the same algorithm on the same data?",
        "With a no, a kernel is wrong as this GPU runs it: a compiler's option, rounding, or a NaN.",
        p9,
        70,
    ),
    Probe(
        "P10",
        "Does NCCL serve two ranks on one GPU?",
        "With a no, this backend is the only way to several ranks on a GPU. With a yes, it is to be measured against "
        "NCCL there.",
        p10,
        70,
    ),
    Probe(
        "P11",
        "Does FSDP2 train a model on ranks that share the GPU as one rank does, also with expandable segments?",
        "With a no, a stream lacks an order that only a GPU shows.",
        p11,
        150,
    ),
    Probe(
        "P12",
        "How many MiB of the GPU does a further communicator take on each rank?",
        "What `device_staging_bytes` is to be for jobs with many groups, such as those of a mesh with four dimensions.",
        p12,
        100,
    ),
]
