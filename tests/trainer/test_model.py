"""Packed forwards see each sequence alone."""

from pathlib import Path

import pytest
import torch

from fsref.config import LossSection
from fsref.errors import ConfigError
from fsref.trainer.loss import SUMS, micro_batch_loss, trained_rows
from fsref.trainer.model import load_policy, logits_at
from fsref.trainer.replay import RouterReplay
from tests.trainer.builders import VOCABULARY, packed, ragged, random_routes, random_sequences, save_tiny_model, tiny_model

LENGTHS = (7, 1, 5, 12, 2)


def test_a_packed_forward_equals_one_forward_per_sequence() -> None:
    model = tiny_model()
    sequences = random_sequences(LENGTHS, seed=1)
    trained = [[0] + [1] * (len(s) - 1) for s in sequences]
    routes = random_routes(sum(LENGTHS), seed=1)
    masks = [[t % VOCABULARY, (t + 7) % VOCABULARY] if t % 3 else [] for t in range(sum(LENGTHS))]
    logq = [-0.1 * t for t in range(sum(LENGTHS))]
    replay = RouterReplay(model)
    config = LossSection(ratio_low=0.01, ratio_high=100.0)

    whole = packed(sequences, trained=trained, logprobs=logq, fields={"sampling_mask": ragged(masks)})
    with replay.block(routes, replay=True):
        logits = logits_at(model, whole, trained_rows(whole), dtype=torch.float32)
    together = micro_batch_loss(logits, whole, trained_rows(whole), config=config)

    parts, sums, at = [], torch.zeros(len(SUMS), dtype=torch.float64), 0
    for sequence, marks in zip(sequences, trained, strict=True):
        end = at + len(sequence)
        alone = packed([sequence], trained=[marks], logprobs=logq[at:end], fields={"sampling_mask": ragged(masks[at:end])})
        with replay.block(routes[at:end], replay=True):
            parts.append(logits_at(model, alone, trained_rows(alone), dtype=torch.float32))
        sums += micro_batch_loss(parts[-1], alone, trained_rows(alone), config=config).sums
        at = end
    torch.testing.assert_close(logits, torch.cat(parts), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together.sums, sums, rtol=1e-4, atol=1e-4)


def test_a_packed_forward_equals_transformers_own_attention() -> None:
    model = tiny_model()
    sequences = random_sequences(LENGTHS, seed=5)
    batch = packed(sequences, trained=[[0] + [1] * (len(s) - 1) for s in sequences])
    ours = logits_at(model, batch, trained_rows(batch), dtype=torch.float32)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    theirs = torch.cat([model(input_ids=torch.tensor([s]), use_cache=False).logits[0, :-1] for s in sequences if len(s) > 1])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_model_with_a_sliding_window_is_refused() -> None:
    batch = packed([[1, 2, 3]], trained=[[0, 1, 1]])
    with pytest.raises(ConfigError, match="window of 2 tokens"):
        logits_at(tiny_model(use_sliding_window=True, sliding_window=2), batch, trained_rows(batch), dtype=torch.float32)


def test_a_change_in_one_sequence_reaches_no_other() -> None:
    model = tiny_model()
    sequences = random_sequences((6, 8), seed=2)
    changed = [[(v + 1) % VOCABULARY for v in sequences[0]], sequences[1]]
    trained = [[0] * 6, [0] + [1] * 7]
    before, after = packed(sequences, trained=trained), packed(changed, trained=trained)
    rows = trained_rows(before)
    first, second = (logits_at(model, batch, rows, dtype=torch.float32) for batch in (before, after))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_a_forward_without_trained_tokens_still_runs_and_gives_zero_gradients() -> None:
    model = tiny_model()
    batch = packed(random_sequences((5,)), trained=[[0] * 5])
    with RouterReplay(model).block(random_routes(5), replay=True) as used:
        logits_at(model, batch, trained_rows(batch), dtype=torch.float32).sum().backward()
    assert used.rows == 10
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())


def test_bfloat16_is_a_matter_of_the_forward_not_of_the_parameters() -> None:
    model = tiny_model()
    batch = packed(random_sequences((5,)), trained=[[0, 1, 1, 1, 1]])
    exact = logits_at(model, batch, trained_rows(batch), dtype=torch.float32)
    rounded = logits_at(model, batch, trained_rows(batch), dtype=torch.bfloat16)
    assert not torch.equal(exact, rounded.float())
    torch.testing.assert_close(exact, rounded.float(), rtol=0.2, atol=0.3)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_saved_model_loads_with_float32_parameters(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, seed=3)
    model = load_policy(tmp_path, device=torch.device("cpu"))
    batch = packed(random_sequences((5,)), trained=[[0, 1, 1, 1, 1]])
    rows = trained_rows(batch)
    assert torch.equal(logits_at(model, batch, rows, dtype=torch.float32), logits_at(tiny_model(seed=3), batch, rows, dtype=torch.float32))


def test_a_folder_without_a_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model in"):
        load_policy(tmp_path, device=torch.device("cpu"))
