"""Checkpoints give back every bit, or say why not."""

from pathlib import Path

import pytest
import torch

from fsref.errors import ConfigError, ObjectCorrupt
from fsref.trainer import checkpoint
from tests.trainer.builders import tiny_model


def trained(seed: int, steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = tiny_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


def save(parent: Path, version: int = 2, run: str = "r-1", ranks: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained(0)
    generators = [torch.get_rng_state()] * ranks
    checkpoint.save(parent, run=run, version=version, generators=generators, model=model, optimizer=optimizer)
    return model, optimizer


def load(parent: Path, *, run: str = "r-1", rank: int = 0, ranks: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    found = checkpoint.newest(parent)
    assert found is not None
    model, optimizer = trained(1, steps=0)
    checkpoint.load(rank, ranks, found, run=run, model=model, optimizer=optimizer)
    return model, optimizer


def test_model_and_optimiser_come_back_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = save(tmp_path)
    loaded, loaded_optimizer = load(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    for key, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, loaded_optimizer.state_dict()["state"][key][name])


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    save(tmp_path)
    expected = torch.randn(3)
    torch.randn(5)
    load(tmp_path)
    assert torch.equal(torch.randn(3), expected)


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "none") is None
    save(tmp_path, version=2)
    save(tmp_path, version=10)
    (tmp_path / "step_000011").mkdir()
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.version == 10


def test_saving_a_version_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path)
    save(tmp_path)
    assert checkpoint.newest(tmp_path) is not None


def test_a_checkpoint_of_another_run_or_world_is_refused(tmp_path: Path) -> None:
    save(tmp_path, ranks=2)
    with pytest.raises(ConfigError, match="r-2"):
        load(tmp_path, run="r-2", ranks=2)
    with pytest.raises(ConfigError, match="written by 2 ranks, 3 were started"):
        load(tmp_path, ranks=3)


def test_a_torn_checkpoint_is_named(tmp_path: Path) -> None:
    save(tmp_path)
    file = tmp_path / "step_000002" / "state.pt"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ObjectCorrupt, match=r"step_000002.state\.pt cannot be read"):
        load(tmp_path)
