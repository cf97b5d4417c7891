"""Accelerate over farandole, against one process. Accelerate takes Gloo on CPUs, unless there is a group already."""

import warnings

import torch
import torch.distributed as dist

dist.init_process_group("farandole")
warnings.simplefilter("ignore")
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import broadcast_object_list, gather_object  # noqa: E402

STEPS, BATCH = 4, 3


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))


accelerator = Accelerator(cpu=True)
assert dist.get_backend() == "farandole"
rank, size = accelerator.process_index, accelerator.num_processes
generator = torch.Generator().manual_seed(1)
data = torch.randn(STEPS * size * BATCH, 5, generator=generator)

model = new_model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=BATCH)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for (rows,) in loader:
    optimizer.zero_grad()
    loss = (model(rows) ** 2).mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    losses.append(loss.detach())
assert len(losses) == STEPS

alone = new_model()
optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
for rows in data.split(size * BATCH):
    optimizer.zero_grad()
    (alone(rows) ** 2).mean().backward()
    torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    optimizer.step()
for mine, theirs in zip(accelerator.unwrap_model(model).parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)

gathered = accelerator.gather(torch.full((2,), float(rank)))
assert gathered.tolist() == [float(other) for other in range(size) for _ in range(2)]
assert accelerator.reduce(torch.tensor([rank + 1.0]), "sum").item() == size * (size + 1) / 2
padded = accelerator.pad_across_processes(torch.ones(1 + rank))
assert padded.tolist() == [1.0] * (1 + rank) + [0.0] * (size - 1 - rank)
assert gather_object([f"of {rank}"]) == [f"of {other}" for other in range(size)]
assert broadcast_object_list([rank, "x" * rank]) == [0, ""]
accelerator.wait_for_everyone()
accelerator.end_training()
print(f"rank {rank} of {size} is through", flush=True)
