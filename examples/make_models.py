"""Tiny real checkpoints, one per kind of cache, LoRA adapters, and the flags with which vLLM runs them right on a CPU.

Each model is a few MB of random weights written by transformers' `save_pretrained` beside a byte-level tokenizer, so
vLLM loads it like any other. The weights come from a fixed seed, and their spread (`INITIALIZER_RANGE`) is wide enough
that the best token's logit stands clear of the second: greedy tokens of two instances can then be compared exactly.

Run as a script to write them: `python examples/make_models.py [--into DIR] [NAME …]`.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

INITIALIZER_RANGE = 0.12
MAX_POSITIONS = 4096
SEED = 20260
WINDOW = 64
SLIDING_LAYERS = (0, 1, 2)
"""Model `swa` has three layers that see the last WINDOW tokens, and one that sees all."""

VOCAB_SIZE = 258
BOS, EOS = 256, 257
TP3_VOCAB_SIZE = 384
"""The smallest vocabulary that three ranks can share: vLLM pads it to a multiple of 64 and then divides it."""

CPU_MLA = ("--attention-backend", "CPU_MLA")
"""On machines with AMX the platform would take a backend that knows bfloat16 only."""

SOURCE_STAMP = "made-by.sha256"
"""File in a checkpoint with the hash of the files that made it, so that a changed model is made anew."""

DEFAULT_DIR = Path(__file__).resolve().parent.parent / ".cache" / "models"


@dataclass(frozen=True, slots=True)
class Model:
    """One checkpoint. `flags` are what `vllm serve` needs beyond the path; the rest says what can be asked of it."""

    name: str
    family: str
    build: Callable[[], Any]
    flags: tuple[str, ...] = ()
    prefix_caching: bool = True
    vocab_size: int = VOCAB_SIZE
    block_size: int = 32
    """Tokens per block where a test asks for none; vLLM's CPU backends take multiples of 32, and 16 only for MLA. A
    hybrid model's is raised until an attention page is as large as a state."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that its server needs."""
    sliding_layers: tuple[int, ...] = ()
    made_by: Path = Path(__file__)
    """The file with `build`."""

    def window_of(self, layer: str) -> int | None:
        """Tokens that a layer, by vLLM's name for it, looks back at; None if all."""
        match = re.search(r"\blayers\.(\d+)\.", layer)
        return WINDOW if match and int(match[1]) in self.sliding_layers else None


def common() -> dict[str, Any]:
    """What every configuration of transformers has here."""
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


def _gqa(kv_heads: int = 4, layers: int = 4) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": kv_heads, "head_dim": 64}
    return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=layers, **heads, **common()))


def _swa() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = 4
    config = Gemma3TextConfig(
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=WINDOW,
        layer_types=["sliding_attention" if i in SLIDING_LAYERS else "full_attention" for i in range(layers)],
        **common(),
    )
    return Gemma3ForCausalLM(config)


def latent() -> dict[str, Any]:
    """What every configuration of DeepSeek's has here."""
    return {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        **common(),
    }


def _mla() -> Any:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    layers = {"num_hidden_layers": 3, "first_k_dense_replace": 3}
    return DeepseekV2ForCausalLM(DeepseekV2Config(**layers, topk_method="greedy", **latent()))


def _gqa6() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {**common(), "vocab_size": TP3_VOCAB_SIZE, "intermediate_size": 384}
    return Qwen3ForCausalLM(
        Qwen3Config(num_hidden_layers=4, num_attention_heads=12, num_key_value_heads=6, head_dim=64, **sizes)
    )


def _qwen3next(attention_layers: tuple[int, ...] = (3,)) -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    layers = 4
    config = Qwen3NextConfig(
        num_hidden_layers=layers,
        layer_types=["full_attention" if i in attention_layers else "linear_attention" for i in range(layers)],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        partial_rotary_factor=0.25,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        # All experts for every token: a choice between near-equal experts would turn rounding into other tokens.
        num_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        **common(),
    )
    network = Qwen3NextForCausalLM(config)
    # Runs in bfloat16, whose steps grow with a logit: this keeps one step below 0.04, so near-ties stay recognizable.
    network.lm_head.weight.data.mul_(0.5)
    return network


def _granite(layers: int = 4, state_size: int = 32) -> Any:
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        num_hidden_layers=layers,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=state_size,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_d_conv=4,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
        attention_multiplier=32**-0.5,
        **common(),
    )
    return GraniteMoeHybridForCausalLM(config)


class _KimiLinear:
    """Written by hand, because transformers does not know this model: tensors under the names that vLLM loads.

    Matrices are normal with spread INITIALIZER_RANGE, norms are 1, and the decay of KDA's states is drawn like in the
    models that transformers initializes. Source of names and shapes: vLLM 0.32, `vllm/models/kimi_k3/amd/linear.py`.
    """

    def __init__(self, kda_heads: int, kda_head_size: int):
        layers, heads, latent, rope, nope, value = 4, 4, 512, 64, 64, 64
        self.config = {
            **common(),
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "head_dim": nope + rope,
            "kv_lora_rank": latent,
            "qk_rope_head_dim": rope,
            "qk_nope_head_dim": nope,
            "v_head_dim": value,
            "mla_use_nope": True,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "num_heads": kda_heads,
                "head_dim": kda_head_size,
                "short_conv_kernel_size": 4,
            },
        }
        hidden, inner = self.config["hidden_size"], self.config["intermediate_size"]
        self.tensors: dict[str, Any] = {}
        self._matrices("model", embed_tokens=(VOCAB_SIZE, hidden))
        for layer in range(layers):
            name = f"model.layers.{layer}"
            self._ones(f"{name}.input_layernorm", hidden)
            self._ones(f"{name}.post_attention_layernorm", hidden)
            self._matrices(f"{name}.mlp", gate_proj=(inner, hidden), up_proj=(inner, hidden), down_proj=(hidden, inner))
            if layer < 3:
                self._kda(f"{name}.self_attn", hidden, kda_heads, kda_head_size)
            else:
                self._matrices(
                    f"{name}.self_attn",
                    q_proj=(heads * (nope + rope), hidden),
                    kv_a_proj_with_mqa=(latent + rope, hidden),
                    kv_b_proj=(heads * (nope + value), latent),
                    o_proj=(hidden, heads * value),
                )
                self._ones(f"{name}.self_attn.kv_a_layernorm", latent)
        self._ones("model.norm", hidden)
        self._matrices("", lm_head=(VOCAB_SIZE, hidden))

    def _kda(self, name: str, hidden: int, heads: int, size: int) -> None:
        import torch

        wide = heads * size
        self._matrices(name, **{f"{part}_proj": (wide, hidden) for part in "qkv"})
        self._matrices(name, **{f"{part}_conv1d": (wide, 1, 4) for part in "qkv"})
        self._matrices(name, b_proj=(heads, hidden), o_proj=(hidden, wide))
        self._matrices(name, f_a_proj=(size, hidden), f_b_proj=(wide, size))
        self._matrices(name, g_a_proj=(size, hidden), g_b_proj=(wide, size))
        self._ones(f"{name}.o_norm", size)
        self.tensors[f"{name}.A_log"] = torch.empty(heads).uniform_(1, 16).log()
        self.tensors[f"{name}.dt_bias"] = torch.empty(wide).uniform_(-7, -2)

    def _matrices(self, prefix: str, **shapes: tuple[int, ...]) -> None:
        import torch

        for name, shape in shapes.items():
            self.tensors[".".join(filter(None, (prefix, name, "weight")))] = torch.randn(shape) * INITIALIZER_RANGE

    def _ones(self, name: str, size: int) -> None:
        import torch

        self.tensors[f"{name}.weight"] = torch.ones(size)

    def to(self, dtype: Any) -> _KimiLinear:
        self.tensors = {name: tensor.to(dtype) for name, tensor in self.tensors.items()}
        return self

    def save_pretrained(self, directory: Path) -> None:
        from safetensors.torch import save_file

        (directory / "config.json").write_text(json.dumps(self.config, indent=1))
        save_file(self.tensors, directory / "model.safetensors", metadata={"format": "pt"})


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("gqa", "GQA", _gqa),
        Model("swa", "sliding window", _swa, sliding_layers=SLIDING_LAYERS),
        # vLLM's CPU rotary kernel is wrong for MLA's strided queries: decode differs from prefill without the flag.
        # With CPU_MLA the platform forces blocks of 16 tokens and turns prefix caching and chunked prefill off.
        Model(
            "mla",
            "MLA",
            _mla,
            flags=("--compilation-config", json.dumps({"custom_ops": ["none"]}), *CPU_MLA),
            prefix_caching=False,
            block_size=16,
        ),
        # Fewer KV heads than ranks wherever there is more than one rank: every rank has a copy.
        Model("mqa", "MQA", functools.partial(_gqa, 1)),
        Model("gqa6", "GQA, 6 heads", _gqa6, vocab_size=TP3_VOCAB_SIZE),
        # vLLM's GDN kernels for the CPU take bfloat16 only. In bfloat16 CPU_ATTN packs K for AMX where there is AMX,
        # and such pages move between equal instances only; the reference attention's are plain on every machine.
        Model(
            "qwen3next",
            "GDN and attention",
            _qwen3next,
            flags=("--dtype", "bfloat16"),
            environment={"PD_TEST_REFERENCE_ATTENTION": "1", "VLLM_KV_CACHE_LAYOUT": "HND"},
        ),
        # With prefix caching, vLLM's Mamba2 layer fails on the CPU for prompts of more than one prefill step.
        Model("granite", "Mamba2 and attention", _granite, flags=("--no-enable-prefix-caching",), prefix_caching=False),
        *(
            Model(
                name,
                f"KDA ({heads} x {size}) and MLA",
                functools.partial(_KimiLinear, heads, size),
                flags=CPU_MLA,
                block_size=16,
                environment={"PD_TEST_KIMI": "1"},
            )
            for name, heads, size in (("kimi", 4, 128), ("kimi16", 16, 64))
        ),
    )
}


WINDOWED_HYBRID = replace(
    MODELS["qwen3next"],
    name="qwen3next-window",
    family="GDN, attention and sliding window",
    build=functools.partial(_qwen3next, (1, 3)),
    environment={**MODELS["qwen3next"].environment, "PD_TEST_WINDOWED_HYBRID": "1"},
    sliding_layers=(1,),
)
"""States, full attention and a window. No such model of vLLM's runs on a CPU: a test plugin narrows layer 1."""


DEEP = replace(MODELS["gqa"], name="deep", family="GQA, 16 layers", build=functools.partial(_gqa, layers=16))
"""As many layers as a push that is written layer by layer has waves."""

DEEP_HYBRID = replace(
    MODELS["granite"],
    name="deep-hybrid",
    family="Mamba2 and attention, 40 layers",
    build=functools.partial(_granite, 40, 128),
)
"""Each fourth layer is attention, as in Qwen3-Next, Qwen3.5 and Kimi Linear, so a push has ten waves. Mamba2 because on
a CPU vLLM's GDN takes five times as long. The states of a wave are a third of its bytes for a prompt of 1920 tokens."""


def _moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    # All experts for every token: see `_qwen3next`.
    experts = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=2, **heads, **experts, **common()))


EXPERTS = Model("moe", "GQA, a mixture of experts", _moe)


ADAPTER_RANK = 8
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Keys and values among them, so that what is cached depends on the adapter."""


def _adapter(base: Path, seed: int, directory: Path) -> None:
    """A LoRA adapter of every attention layer in PEFT's form, written by hand, as peft is not needed for anything else.

    Both factors have the spread of the model's own matrices, so that an adapter changes most answers.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": ADAPTER_RANK,
        "lora_alpha": 2 * ADAPTER_RANK,
        "target_modules": list(ADAPTED),
        "lora_dropout": 0.0,
        "bias": "none",
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    with safe_open(base / "model.safetensors", "pt") as weights:
        for name in sorted(weights.keys()):
            layer, _, kind = name.removesuffix(".weight").rpartition(".")
            if kind in ADAPTED:
                wide, narrow = weights.get_slice(name).get_shape()
                for factor, shape in (("A", (ADAPTER_RANK, narrow)), ("B", (wide, ADAPTER_RANK))):
                    drawn = torch.randn(shape, generator=generator) * INITIALIZER_RANGE
                    tensors[f"base_model.model.{layer}.{kind}.lora_{factor}.weight"] = drawn
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _tokenizer(vocab_size: int) -> Any:
    """A tokenizer of the 256 bytes and two special tokens, without merges: any text, one token per byte.

    A model with more tokens gets names for the others; no text contains them.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    unused = [f"<unused{index}>" for index in range(VOCAB_SIZE, vocab_size)]
    vocab = {symbol: index for index, symbol in enumerate([*alphabet, "<s>", "</s>", *unused])}
    assert (len(vocab), vocab["<s>"], vocab["</s>"]) == (vocab_size, BOS, EOS)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    return fast


def make(model: Model, directory: Path = DEFAULT_DIR) -> Path:
    """Write the checkpoint `directory/<name>` unless this file wrote it already, and return its path."""

    def write(partial: Path) -> None:
        import torch
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            network = model.build().to(torch.float32)
        network.save_pretrained(partial)
        _tokenizer(model.vocab_size).save_pretrained(partial)

    return made(directory / model.name, write, model.made_by)


def make_adapter(model: Model, number: int, directory: Path = DEFAULT_DIR) -> Path:
    """Write the LoRA adapter `directory/<name>-adapter-<number>` of a model whose attention layers have the projections
    ADAPTED, unless this file wrote it already, and return its path. Adapters of other numbers have other weights."""
    base = make(model, directory)
    return made(directory / f"{model.name}-adapter-{number}", lambda partial: _adapter(base, SEED + number, partial))


def made(path: Path, write: Callable[[Path], None], by: Path = Path(__file__)) -> Path:
    """`path`, written by `write`, a function of the file `by`, into an empty directory, unless that file and this one
    wrote it as they are.

    What is half-written is never found under that name: it is written beside it and renamed. Of several processes that
    want it one writes, and the others wait.
    """
    source = hashlib.sha256(b"".join(one.read_bytes() for one in sorted({Path(__file__), by}))).hexdigest()
    stamp = path / SOURCE_STAMP
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == source:
            return path
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write(partial)
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
