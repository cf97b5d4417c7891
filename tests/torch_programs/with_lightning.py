"""Lightning over farandole, which the strategy names, against one process."""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
import lightning  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

SIZE, STEPS, BATCH = int(sys.argv[1]), 4, 3


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 2))


class Training(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = new_model()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = (self.model(batch[0]) ** 2).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


data = torch.randn(STEPS * SIZE * BATCH, 5, generator=torch.Generator().manual_seed(1))
dataset = torch.utils.data.TensorDataset(data)
sampler = torch.utils.data.DistributedSampler(dataset, SIZE, int(os.environ["RANK"]), shuffle=False)
loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, sampler=sampler)
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=SIZE,
        max_epochs=1,
        strategy=DDPStrategy(process_group_backend="farandole"),
        use_distributed_sampler=False,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    training = Training()
    trainer.fit(training, loader)
assert dist.get_backend() == "farandole"
assert trainer.global_step == STEPS

# The sampler deals rows out in turn. Every rank normalizes by its own batch, as without SyncBatchNorm.
copies = [new_model() for _ in range(SIZE)]
for step in range(STEPS):
    gradients = []
    for rank, copy in enumerate(copies):
        rows = data[rank::SIZE][step * BATCH : (step + 1) * BATCH]
        gradients.append(torch.autograd.grad((copy(rows) ** 2).mean(), list(copy.parameters())))
    with torch.no_grad():
        for copy in copies:
            for parameter, *each in zip(copy.parameters(), *gradients, strict=True):
                parameter -= 0.1 * sum(each) / SIZE
for mine, theirs in zip(training.model.parameters(), copies[0].parameters(), strict=True):
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
print(f"rank {dist.get_rank()} of {SIZE} is through", flush=True)
