"""Exports that an engine can load."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from fsref.folders import published
from fsref.trainer.model import load_policy, logits_at
from fsref.trainer.weights import export, remove_future
from tests.trainer.builders import packed, random_sequences, save_tiny_model, tiny_model


def base_folder(tmp_path: Path) -> Path:
    base = tmp_path / "model"
    save_tiny_model(base)
    (base / "tokenizer.json").write_text("{}", encoding="utf-8")
    (base / "extra.safetensors").write_bytes(b"")
    return base


def test_an_export_holds_bfloat16_weights_under_the_published_names(tmp_path: Path) -> None:
    folder = export(tiny_model(seed=1), version=1, parent=tmp_path / "weights", base=base_folder(tmp_path))
    state = load_file(folder / "model.safetensors")
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    assert state.keys() == load_file(tmp_path / "model" / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.7.down_proj.weight" in state


def test_an_export_copies_config_and_tokenizer_but_no_other_weights(tmp_path: Path) -> None:
    base = base_folder(tmp_path)
    folder = export(tiny_model(), version=1, parent=tmp_path / "weights", base=base)
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / "extra.safetensors").exists()
    wanted = json.loads((base / "config.json").read_text(encoding="utf-8")) | {"dtype": "bfloat16"}
    assert json.loads((folder / "config.json").read_text(encoding="utf-8")) == wanted


def test_a_loaded_export_computes_what_the_trainer_does_up_to_bfloat16(tmp_path: Path) -> None:
    model = tiny_model(seed=2)
    folder = export(model, version=4, parent=tmp_path / "weights", base=base_folder(tmp_path))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    loaded = load_policy(folder, device=torch.device("cpu"))
    batch = packed(random_sequences((9,)), trained=[[0] + [1] * 8])
    rows = batch.loss_mask.nonzero()[:, 0]
    assert torch.equal(logits_at(loaded, batch, rows, dtype=torch.float32), logits_at(model, batch, rows, dtype=torch.float32))


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    folder = export(tiny_model(tie_word_embeddings=True), version=1, parent=tmp_path / "weights", base=base_folder(tmp_path))
    state = load_file(folder / "model.safetensors")
    assert "model.embed_tokens.weight" in state
    assert "lm_head.weight" not in state


def test_exporting_a_version_again_replaces_it(tmp_path: Path) -> None:
    base = base_folder(tmp_path)
    first = export(tiny_model(seed=1), version=1, parent=tmp_path / "weights", base=base)
    before = (first / "model.safetensors").read_bytes()
    second = export(tiny_model(seed=2), version=1, parent=tmp_path / "weights", base=base)
    assert (second / "model.safetensors").read_bytes() != before


def test_exports_of_an_ended_attempt_are_removed(tmp_path: Path) -> None:
    base = base_folder(tmp_path)
    for version in (1, 2, 3):
        export(tiny_model(), version=version, parent=tmp_path / "weights", base=base)
    remove_future(tmp_path / "weights", version=2)
    assert list(published(tmp_path / "weights")) == [1, 2]
