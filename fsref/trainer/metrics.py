"""The trainer's metrics: names, and how the values of all ranks become one record (docs/trainer.md has the table).

Owns arithmetic only; who listens is decided by whoever holds the hook.
"""

from collections.abc import Iterable, Mapping

from fsref.steps import RankFile
from fsref.trainer.learner import Update


def share(part: float, whole: float) -> float:
    """``part / whole``, 0 where there is no whole."""
    return part / whole if whole else 0.0


def comparison_metrics(update: Update, *, replay: bool) -> dict[str, float]:
    """What ``loss.compare_replay`` measured: the figures of the pass that did not train, named after what it did."""
    s = update.other_sums
    suffix = "without_replay" if replay else "with_replay"
    return {
        f"mismatch_kl/{suffix}": share(s["mismatch_kl"], s["tokens"] - s["tokens_unscored"]),
        f"mismatch_kl/fresh_{suffix}": share(s["mismatch_kl_fresh"], s["tokens_fresh"]),
        f"routing/rows_different_share_{suffix}": share(update.other_rows_different, update.routing_rows),
    }


def loss_metrics(update: Update) -> dict[str, float]:
    """Means over the step's trained tokens, from sums over all ranks."""
    s = update.sums
    tokens = s["tokens"]
    return {
        "loss/mean": share(s["loss"], tokens),
        "loss/policy": share(s["loss_policy"], tokens),
        "loss/center": share(s["loss_center"], tokens),
        "loss/tokens": tokens,
        "loss/masked_share": share(s["tokens_masked"], tokens),
        "loss/unscored_tokens": s["tokens_unscored"],
        "loss/missing_tokens": s["tokens_missing"],
        "mismatch_kl/mean": share(s["mismatch_kl"], tokens - s["tokens_unscored"]),
        "mismatch_kl/fresh": share(s["mismatch_kl_fresh"], s["tokens_fresh"]),
        "mismatch_kl/fresh_tokens": s["tokens_fresh"],
        "entropy/mean": share(s["entropy"], tokens),
        "sampling_mask/share": share(s["tokens_kept_set"], tokens),
        "sampling_mask/size": share(s["kept_set_size"], s["tokens_kept_set"]),
        "sampling_mask/without_sampled": s["kept_set_without_sampled"],
        "top_logprobs/share": share(s["tokens_head"], tokens),
        "top_logprobs/mass": share(s["head_mass"], s["tokens_head"]),
        "top_logprobs/outside_mask": s["head_outside_kept_set"],
        "routing/rows": update.routing_rows,
        "routing/rows_different": update.routing_rows_different,
        "routing/rows_different_share": share(update.routing_rows_different, update.routing_rows),
        "optimizer/grad_norm": update.grad_norm,
        "optimizer/skipped": float(update.skipped),
    }


def sample_sums(rank_file: RankFile) -> dict[str, float]:
    """This rank's real samples: sums that add up over ranks, under names that ``sample_metrics`` reads."""
    samples = {q.sample: q for m in rank_file.micro_batches for q in m.sequences if not q.padding}
    lags = [rank_file.step - q.version for q in samples.values()]
    return {
        "samples": float(len(samples)),
        "reward": sum(q.reward for q in samples.values()),
        "lag": float(sum(lags)),
        "tokens": float(sum(q.token_count for q in samples.values())),
    }


def sample_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    return {
        "batch/samples": sums["samples"],
        "batch/tokens": sums["tokens"],
        "reward/mean": share(sums["reward"], sums["samples"]),
        "off_policy/lag": share(sums["lag"], sums["samples"]),
    }


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Per name, the sum over ``parts``."""
    out: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            out[name] = out.get(name, 0.0) + value
    return out
