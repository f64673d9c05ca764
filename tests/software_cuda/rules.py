"""Run with the software devices: each rule that a test relies on, once. Prints ``kept`` at the end."""

import concurrent.futures
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from software_tensors import Transfers

ones = torch.ones(3, 4, device="cuda")
assert ones.is_cuda and ones.device == torch.device("cuda", 0) and ones.type() == "torch.cuda.FloatTensor"
assert (ones + torch.tensor(1.0)).is_cuda and ones[torch.tensor([0, 2])].shape == (2, 4)
with pytest.raises(RuntimeError, match="same device"):
    ones + torch.ones(3, 4)
with pytest.raises(RuntimeError, match="same device"):
    ones + torch.ones(3, 4, device="cuda:1")
with pytest.raises(TypeError, match="numpy"):
    ones.numpy()

# Autograd, and parameters that are views of a buffer, as megatron-core has them.
buffer = torch.zeros(16, device="cuda")
weight = torch.nn.Parameter(torch.empty(4, 4, device="cuda"))
weight.data = buffer.view(4, 4)
buffer.fill_(3.0)
(ones @ weight).sum().backward()
assert weight.sum().item() == 48.0 and weight.grad.is_cuda and weight.grad.tolist() == [[3.0] * 4] * 4

# Random states are the device's own.
torch.cuda.manual_seed(1)
state, drawn = torch.cuda.get_rng_state(), torch.rand(3, device="cuda")
torch.rand(3)
torch.cuda.set_rng_state(state)
assert torch.equal(drawn, torch.rand(3, device="cuda"))

# Memory is given back when nobody has it.
before = torch.cuda.memory_allocated()
large = torch.empty(1000, device="cuda")
view = large[10:]
del large
assert torch.cuda.memory_allocated() == before + 4000
del view
assert torch.cuda.memory_allocated() == before

# Copies that nobody waits for.
pinned = torch.zeros(4, pin_memory=True)
pinned.copy_(ones[0], non_blocking=True)
assert pinned.tolist() != [1.0] * 4
torch.cuda.synchronize()
assert pinned.tolist() == [1.0] * 4
arrived = ones.to("cpu", non_blocking=True)
assert (
    not torch.equal(arrived, torch.ones(3, 4)) and ones.sum().item() == 12.0 and torch.equal(arrived, torch.ones(3, 4))
)
ones[0].copy_(pinned, non_blocking=True)
pinned.fill_(5.0)
with pytest.raises(RuntimeError, match="before it was copied"):
    torch.cuda.synchronize()


# Waiting is counted.
def waits(work: Callable[[], object]) -> int:
    before = Transfers.num_waits
    work()
    return Transfers.num_waits - before


places = torch.tensor([0, 2], device="cuda")
assert waits(lambda: ones * 2 + ones[places].sum()) == 0
assert waits(lambda: torch.ones(3).pin_memory().to("cuda", non_blocking=True)) == 0
assert waits(lambda: torch.ones(3).to("cuda")) == waits(lambda: torch.tensor([1.0], device="cuda")) == 1
assert waits(lambda: ones[ones > 0]) == waits(lambda: ones.sum().item()) == waits(lambda: ones.cpu()) == 1

# Graphs.
graph, given, taken = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
with torch.cuda.graph(graph):
    doubled = given * 2
    taken.copy_(doubled.cumsum(0))
assert doubled.isnan().all()
given.fill_(3.0)
graph.replay()
assert taken.tolist() == [6.0, 12.0, 18.0, 24.0]
with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
    given.sum().item()

# A thread begins at device 0, whatever the others' is, and NCCL takes no memory of the CPU.
torch.cuda.set_device(1)
assert torch.empty(1, device="cuda").device.index == 1
with concurrent.futures.ThreadPoolExecutor() as pool:
    assert pool.submit(torch.empty, 1, device="cuda").result().device.index == 0
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "nccl"
dist.all_reduce(ones)
with pytest.raises(RuntimeError, match="device type cpu"):
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
print("kept")
