"""A trainer of one's own: FSDP2 over any number of ranks, on CPUs (gloo) or GPUs, over the steps of an fsref run.

    torchrun --nproc-per-node 2 docs/examples/fsdp2.py runs/RUN/config.json

The model is a toy whose layers take the experts of every token as an argument, as router replay does with a real one. What is fsref's is
marked; ``trainer.parallel.data`` of the config must be the number of ranks.
"""

import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsref.config import load
from fsref.loader import ROUTING, StepLoader

VOCABULARY, WIDTH, EXPERTS = 48, 16, 8


class MoeLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, hidden_TD: Tensor, experts_TK: Tensor) -> Tensor:
        """The sampler's experts, weighed by this router's own probabilities, so that it learns too."""
        weights_TK = self.router(hidden_TD).softmax(-1).gather(1, experts_TK)
        outputs_TKD = torch.einsum("td,tkde->tke", hidden_TD, self.experts[experts_TK]).relu()
        return hidden_TD + (weights_TK.unsqueeze(-1) * outputs_TKD).sum(1)


class Policy(nn.Module):
    def __init__(self, layer_count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MoeLayer() for _ in range(layer_count))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, token_ids_T: Tensor, experts_TLK: Tensor) -> Tensor:
        hidden_TD = self.embed(token_ids_T)
        for number, layer in enumerate(self.layers):
            hidden_TD = layer(hidden_TD, experts_TLK[:, number].long())
        return self.head(hidden_TD)


def main(config_path: str) -> list[float]:
    config = load(config_path)
    torch.manual_seed(config.run.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layer_count = 2
    model = Policy(layer_count).to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.trainer.learning_rate)
    checkpoints = Path(config.run.run_dir) / "fsdp2"
    version = len(list(checkpoints.glob("step_*/.metadata")))
    if version:
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=checkpoints / f"step_{version:06d}")
    losses = []
    with StepLoader.open(config, first=version, device=device) as loader:  # fsref: over the process group that is there
        for step in loader:  # fsref: the same step on all ranks
            mine = sum(m.tensors.loss_mask.sum() for m in step.micro_batches)
            trained = torch.as_tensor(mine, dtype=torch.float32, device=device)
            dist.all_reduce(trained)
            total = torch.zeros((), device=device)
            for micro_batch in step.micro_batches:  # fsref: equally many on every rank; a dropped one has nothing to train, and runs
                batch = micro_batch.tensors
                logits = model(batch.token_ids, batch.fields[ROUTING].rows)  # fsref: int32 [T, L, K], what the sampler used
                logprobs = torch.log_softmax(logits[:-1] / batch.temperature[1:, None], -1)
                mine_T = logprobs.gather(1, batch.token_ids[1:, None]).squeeze(1)
                ratio = (mine_T - batch.logprobs[1:]).exp()
                loss = -(ratio * batch.advantages[1:] * batch.loss_mask[1:]).sum() * dist.get_world_size() / trained.clamp_min(1)
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=checkpoints / f"step_{step.number + 1:06d}")
            loader.commit(step.number, durable=True)  # fsref: its arrays are not needed any more, and go
            losses.append(float(total))
            logging.info("step %d: loss %.4f, %d micro batches dropped", step.number, total, step.agreement.dropped_count)
        loader.finish()
    return losses


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group()
    main(sys.argv[1])
    dist.destroy_process_group()
