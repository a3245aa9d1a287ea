"""A model folder without weights: a byte-level tokenizer with Qwen3's special tokens, and the sizes of a tiny Qwen3-MoE."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
END = SPECIAL.index("<|im_end|>")
LAYERS, TOP_K, EXPERTS, VOCAB = 3, 2, 16, 400
DENSE_LAYERS = (1,)
MOE_LAYERS = tuple(n for n in range(LAYERS) if n not in DENSE_LAYERS)


def make(folder: Path) -> Path:
    """Writes the folder and returns it."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant system please write only vowels more other say hello world"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "model_max_length": 1 << 20,
                "added_tokens_decoder": {
                    str(n): {"content": t, "special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
                    for n, t in enumerate(SPECIAL)
                },
            }
        )
    )
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen3_moe",
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_hidden_layers": LAYERS,
                "num_experts": EXPERTS,
                "num_experts_per_tok": TOP_K,
                "mlp_only_layers": list(DENSE_LAYERS),
                "decoder_sparse_step": 1,
                "vocab_size": VOCAB,
                "hidden_size": 32,
                "eos_token_id": END,
            }
        )
    )
    return folder
