"""Tiny real checkpoints, one per kind of cache, and the flags with which vLLM runs them right on a CPU.

Each model is a few MB of random weights written by transformers' `save_pretrained` beside a byte-level tokenizer, so
vLLM loads it like any other. The weights come from a fixed seed, and their spread (`INITIALIZER_RANGE`) is wide enough
that the best token's logit stands clear of the second: greedy tokens of two instances can then be compared exactly.

Run as a script to write them: `python examples/make_models.py [--into DIR] [NAME …]`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INITIALIZER_RANGE = 0.12
MAX_POSITIONS = 4096
SEED = 20260
WINDOW = 64
"""Tokens that a sliding-window layer of model `swa` sees."""

VOCAB_SIZE = 258
BOS, EOS = 256, 257

SOURCE_STAMP = "made-by.sha256"
"""File in a checkpoint with the hash of this file, so that a changed model is made anew."""

DEFAULT_DIR = Path(__file__).resolve().parent.parent / ".cache" / "models"


@dataclass(frozen=True, slots=True)
class Model:
    """One checkpoint. `flags` are what `vllm serve` needs beyond the path; the rest says what can be asked of it."""

    name: str
    family: str
    build: Callable[[], Any]
    flags: tuple[str, ...] = ()
    prefix_caching: bool = True
    block_size: int = 32
    """Tokens per block where a test asks for none; vLLM's CPU backends take multiples of 32, and 16 only for MLA."""


def _common() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }


def _gqa() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=64, **_common())
    )


def _swa() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        **_common(),
    )
    return Gemma3ForCausalLM(config)


def _mla() -> Any:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    layers = 3
    config = DeepseekV2Config(
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=layers,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        **_common(),
    )
    return DeepseekV2ForCausalLM(config)


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("gqa", "GQA", _gqa),
        Model("swa", "sliding window", _swa),
        # vLLM's CPU rotary kernel is wrong for MLA's strided queries: decode differs from prefill without the flag.
        # The platform forces blocks of 16 tokens and turns prefix caching and chunked prefill off.
        Model(
            "mla",
            "MLA",
            _mla,
            flags=("--compilation-config", json.dumps({"custom_ops": ["none"]})),
            prefix_caching=False,
            block_size=16,
        ),
    )
}


def _tokenizer() -> Any:
    """A tokenizer of the 256 bytes and two special tokens, without merges: any text, one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate([*alphabet, "<s>", "</s>"])}
    assert (len(vocab), vocab["<s>"], vocab["</s>"]) == (VOCAB_SIZE, BOS, EOS)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    return fast


def make(model: Model, directory: Path = DEFAULT_DIR) -> Path:
    """Write the checkpoint `directory/<name>` unless this file wrote it already, and return its path.

    A half-written checkpoint is never found under that name: it is written beside it and renamed.
    """
    path = directory / model.name
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    stamp = path / SOURCE_STAMP
    if stamp.exists() and stamp.read_text() == source:
        return path
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    partial = directory / f".{model.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        network = model.build().to(torch.float32)
    network.save_pretrained(partial)
    _tokenizer().save_pretrained(partial)
    (partial / SOURCE_STAMP).write_text(source)
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=list(MODELS), metavar="NAME", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--into", type=Path, default=DEFAULT_DIR)
    options = parser.parse_args(arguments)
    for name in options.names:
        print(make(MODELS[name], options.into))


if __name__ == "__main__":
    main()
