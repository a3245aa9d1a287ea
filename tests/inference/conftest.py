"""A tiny model folder for the whole session, and an engine on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fsref.inference.engine import Engine
from fsref.inference.model import ModelSizes, make_model
from fsref.inference.network import Architecture, read_architecture, read_weights

SIZES = ModelSizes(hidden=32, layers=3, experts=8, top_k=2, expert_hidden=32, dense_hidden=64, dense_layers=(1,), context_tokens=512)
"""Three layers, the middle one dense."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    make_model(folder, seed=7, sizes=SIZES)
    return folder


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights, as a trainer would write them after twelve steps."""
    folder = tmp_path_factory.mktemp("weights") / "step_000012"
    make_model(folder, seed=8, sizes=SIZES)
    return folder


@pytest.fixture(scope="session")
def arch(model_folder: Path) -> Architecture:
    return read_architecture(model_folder)


@pytest.fixture
def engine(model_folder: Path, arch: Architecture) -> Iterator[Engine]:
    """In float32, four slots of 256 tokens."""
    weights = read_weights(model_folder, arch, torch.float32)
    with Engine(weights, arch, slots=4, context=256, dtype=torch.float32) as engine:
        yield engine
