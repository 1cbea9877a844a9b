"""A PyTorch program that holds one kind of contents, and says on demand whether all of it still works.

It runs on the host's Python, with PyTorch and nothing of Leasehold.

    contents_program.py NAME      a name of CONTENTS
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

NUMBERS = 1 << 24
LOOK_S = 0.2
PROGRESS_S = 10.0
PROFILER = "attached profiler"

Check = Callable[[], bool]
kept: list[Any] = []
"""What the program holds besides its tensor."""


def tensor() -> tuple[Any, Check]:
    """A tensor in device memory, and whether its sum is what it was."""
    import torch

    numbers: Any = torch.arange(NUMBERS, dtype=torch.float32, device="cuda") % 251
    expected = float(numbers.sum(dtype=torch.float64).item())
    return numbers, lambda: float(numbers.sum(dtype=torch.float64).item()) == expected


def plain(_numbers: Any) -> Check:
    return lambda: True


def pinned_memory(_numbers: Any) -> Check:
    import torch

    pinned = torch.arange(NUMBERS, dtype=torch.int64).pin_memory()
    expected = int(pinned.sum())
    return lambda: int(pinned.to("cuda", non_blocking=True).sum().item()) == expected


def registered_memory(_numbers: Any) -> Check:
    import torch

    memory = torch.zeros(NUMBERS)
    address, size = memory.data_ptr(), memory.numel() * memory.element_size()
    if torch.cuda.cudart().cudaHostRegister(address, size, 0) != torch.cuda.cudart().cudaError.success:
        raise RuntimeError("cudaHostRegister failed")
    return lambda: bool(memory.to("cuda", non_blocking=True).sum().item() == 0)


def cuda_graph(_numbers: Any) -> Check:
    import torch

    total, graph, replays = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph(), 0
    with torch.cuda.graph(graph):
        total += 1

    def check() -> bool:
        nonlocal replays
        graph.replay()
        replays += 1
        return int(total.item()) == replays

    return check


def nccl_of_one_rank(_numbers: Any) -> Check:
    import torch
    from torch import distributed

    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    numbers = torch.ones(1 << 16, device="cuda")

    def check() -> bool:
        distributed.all_reduce(numbers)
        return bool(numbers.sum().item() == numbers.numel())

    check()
    return check


def exported_ipc_memory(numbers: Any) -> Check:
    kept.append(numbers.untyped_storage()._share_cuda_())
    return lambda: True


def attached_profiler(_numbers: Any) -> Check:
    from torch import profiler

    kept.append(profiler.profile(activities=[profiler.ProfilerActivity.CUDA]))
    kept[-1].start()
    return lambda: True


def compute_libraries(_numbers: Any) -> Check:
    import torch

    matrix = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    convolution = torch.nn.Conv2d(8, 8, 3, device="cuda")
    image = torch.randn(4, 8, 64, 64, device="cuda")
    product, convolved = (matrix @ matrix).clone(), convolution(image).detach().clone()
    return lambda: torch.equal(matrix @ matrix, product) and torch.allclose(convolution(image), convolved)


def compiled_kernel(numbers: Any) -> Check:
    import torch

    function: Any = torch.compile(lambda values: (values * 2 + 1).sum())
    expected = float(function(numbers).item())
    return lambda: float(function(numbers).item()) == expected


def streams_and_events(numbers: Any) -> Check:
    import torch

    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        more = numbers + 1
        event.record()

    def check() -> bool:
        with torch.cuda.stream(stream):
            same = more - 1
        stream.synchronize()
        return bool(event.query()) and bool(torch.equal(same, numbers))

    return check


def busy_stream(numbers: Any) -> Check:
    rounds, wrong = [0], [0]
    expected = float(numbers.sum().item())

    def work() -> None:
        while True:
            wrong[0] += float(numbers.sum().item()) != expected
            rounds[0] += 1

    threading.Thread(target=work, daemon=True).start()

    def check() -> bool:
        before, end = rounds[0], time.monotonic() + PROGRESS_S
        while rounds[0] == before and time.monotonic() < end:
            time.sleep(LOOK_S)
        return rounds[0] > before and not wrong[0]

    return check


def loader_workers(_numbers: Any) -> Check:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    numbers = TensorDataset(torch.arange(1 << 16))
    loader: Any = DataLoader(numbers, 64, num_workers=2, persistent_workers=True, pin_memory=True)
    batches = [iter(loader)]

    def check() -> bool:
        try:
            (batch,) = next(batches[0])
        except StopIteration:
            batches[0] = iter(loader)
            (batch,) = next(batches[0])
        return int(batch.to("cuda").sum().item()) == int(batch.sum())

    check()
    return check


def forked_child(_numbers: Any) -> Check:
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        os._exit(0)
    return lambda: True


def expandable_segments(_numbers: Any) -> Check:
    return lambda: True  # the allocator was set up before the import


CONTENTS: dict[str, Callable[[Any], Check]] = {
    "tensor": plain,
    "pinned host memory": pinned_memory,
    "registered host memory": registered_memory,
    "CUDA graph": cuda_graph,
    "expandable segments": expandable_segments,
    "streams and events": streams_and_events,
    "cuBLAS and cuDNN": compute_libraries,
    "torch.compile": compiled_kernel,
    "busy stream": busy_stream,
    "NCCL of one rank": nccl_of_one_rank,
    "DataLoader workers": loader_workers,
    "forked child": forked_child,
    "exported IPC memory": exported_ipc_memory,
    PROFILER: attached_profiler,
}


def main(name: str) -> None:
    """Answers `works` or `broken` for each line of its input, until its input ends."""
    if name == "expandable segments":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    numbers, is_whole = tensor()
    check = CONTENTS[name](numbers)
    if not (is_whole() and check()):
        sys.exit(f"{name} does not work here")
    print("ready", flush=True)
    for _ in sys.stdin:
        print("works" if is_whole() and check() else "broken", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
