"""Train a tiny model for the recall task, in minutes on two cores, and write it as a checkpoint that vLLM serves.

    python benchmarks/accuracy/train_recall.py [--model recall-states] [--into DIR] [--seed N]

The other model, which keeps the pairs in recurrent states, is in `recall_states.py`.

Looking a value up takes two layers of attention: the first writes beside each value which key stood before it, the
second finds the value by its key. From random weights that is learned only after a plateau of thousands of steps, so
the attention starts near it: the first layer's biases make it look back by one token, the second layer's queries and
keys compare contents. What to do with that, and how to do it reliably among hundreds of pairs, is trained. Training
begins with a few pairs and lengthens the context whenever the model has understood the present length. A sequence is
pairs followed by questions about many of them, which makes each one worth many examples.

Ends with 1 if the model does not reach its goal at full length within STEPS steps.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.accuracy import recall_states
from benchmarks.accuracy.recall_task import ASK, BOS, END, EOS, KEYS, VALUES, VOCAB_SIZE, WORD_IDS, WORDS

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_DIR = ROOT / ".cache" / "models"

STAMP = "made-by.sha256"
"""File in the checkpoint with the hash of the code that made it."""

ENOUGH = 0.97
"""Share of right answers at one length before the next begins."""
STEPS = 6000
WIDTH, HEADS, KV_HEADS, HEAD_SIZE = 128, 4, 2, 64
ROPE_THETA = 1e6
FAST, SLOW = 0.05, 1e-3
"""Radians per token: pairs of dimensions above the first tell neighbours apart, those below the second hardly turn
over the whole context."""
LOOK_BACK, COMPARE = 5.0, 1.5
"""Lengths with which the two layers start; large enough that attention is sharp."""
CHECK_EVERY = 25


def network() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=2048,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=WORD_IDS[BOS],
        eos_token_id=WORD_IDS[EOS],
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    first, second = (layer.self_attn for layer in model.model.layers)
    with torch.no_grad():
        # As long as what the layers read, which is normalized: a token must not vanish beside what is added to it.
        torch.nn.init.normal_(model.model.embed_tokens.weight)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight / WIDTH**0.5)
        _look_back_one(first)
        _compare_contents(second)
        for layer in model.model.layers:
            _bring_contents(layer.self_attn)
            layer.mlp.down_proj.weight.zero_()
    return model


def _look_back_one(attention: Any) -> None:
    """Let all heads of a layer see the token before, whatever stands there.

    Rotary position embedding turns dimensions (i, i + half) of a query and a key by their positions times
    `frequency[i]`. With the key's bias at angle 0 and the query's at angle `-frequency[i]` their product is largest
    where the key stands one position before the query; only fast pairs tell neighbours apart.
    """
    half = HEAD_SIZE // 2
    frequency = ROPE_THETA ** (-torch.arange(half) / half)
    fast = (frequency > FAST).float()
    key = torch.cat([fast, torch.zeros(half)])
    query = torch.cat([frequency.cos() * fast, -frequency.sin() * fast])
    for projection, bias in ((attention.k_proj, key), (attention.q_proj, query)):
        projection.bias.copy_(LOOK_BACK * bias.repeat(projection.bias.numel() // HEAD_SIZE))


def _bring_contents(attention: Any) -> None:
    """Let a layer add what it sees to what stands there."""
    turn = torch.nn.init.orthogonal_(torch.empty(WIDTH, WIDTH))
    attention.v_proj.weight.copy_(turn)
    # Two heads share each half of the values, so each brings half of it back.
    back = turn.T.unflatten(1, (KV_HEADS, HEAD_SIZE)).repeat_interleave(HEADS // KV_HEADS, dim=1)
    attention.o_proj.weight.copy_(back.flatten(1) * KV_HEADS / HEADS)


def _compare_contents(attention: Any) -> None:
    """Let a query see the positions whose contents are like its own, at any distance: in slow pairs only."""
    half = HEAD_SIZE // 2
    slow = ROPE_THETA ** (-torch.arange(half) / half) < SLOW
    rows = torch.cat([slow, slow]).float().unsqueeze(1)
    contents = torch.nn.init.orthogonal_(torch.empty(KV_HEADS, HEAD_SIZE, WIDTH).flatten(0, 1))
    contents = COMPARE * contents.unflatten(0, (KV_HEADS, HEAD_SIZE)) * rows
    attention.k_proj.weight.add_(contents.flatten(0, 1))
    attention.q_proj.weight.add_(contents.repeat_interleave(HEADS // KV_HEADS, dim=0).flatten(0, 1))


def batch(generator: torch.Generator, pairs: int, asked: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [rows, 2 * pairs + 4 * asked] and the positions [4 * asked // 2] whose next token is to be learned."""
    keys = torch.rand(rows, KEYS, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(VALUES, (rows, pairs), generator=generator)
    told = torch.stack([keys, values + KEYS], 2).flatten(1)
    chosen = torch.rand(rows, pairs, generator=generator).argsort(1)[:, :asked]
    ask = torch.full((rows, asked), WORD_IDS[ASK])
    end = torch.full((rows, asked), WORD_IDS[END])
    questions = torch.stack([ask, keys.gather(1, chosen), values.gather(1, chosen) + KEYS, end], 2).flatten(1)
    starts = 2 * pairs + 4 * torch.arange(asked)
    return torch.cat([told, questions], 1), torch.cat([starts + 1, starts + 2])


@dataclass(frozen=True, slots=True)
class Course:
    """How a model is trained: with so many pairs per sequence, one length after the other, of which at most `asked` are
    asked for, until the last length's share of right answers is `goal`."""

    network: Callable[[], Any]
    lengths: tuple[int, ...]
    asked: int
    tokens_per_step: int
    learning_rate: float
    goal: float


ATTENTION, STATES = "recall", "recall-states"
COURSES = {
    ATTENTION: Course(network, (8, 16, 32, 64, 128, 240), 64, 4096, 5e-4, 0.995),
    STATES: Course(recall_states.network, (4, 8, 16, 32, 48), 32, 2048, 1e-3, 0.99),
}
"""By the checkpoint's name; the last length is what the benchmark asks at most."""


def train(course: Course, seed: int) -> tuple[Any, float]:
    """The trained network and its share of right values at the last length."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = course.network()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=course.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    started, right, level, last = time.monotonic(), 0.0, 0, len(course.lengths) - 1
    for step in range(1, STEPS + 1):
        pairs = course.lengths[level]
        asked = min(pairs, course.asked)
        rows = max(4, course.tokens_per_step // (2 * pairs + 4 * asked))
        tokens, positions = batch(generator, pairs, asked, rows)
        logits = model(tokens).logits[:, positions]
        wanted = tokens[:, positions + 1]
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.param_groups[0]["lr"] = course.learning_rate * min(1.0, step / 50)
        optimizer.step()
        # Of the positions the first half precedes values; what follows a value is always END.
        now = (logits.argmax(-1) == wanted)[:, : len(positions) // 2].float().mean().item()
        right = 0.9 * right + 0.1 * now
        if step % CHECK_EVERY == 0:
            print(f"step {step:5}  pairs {pairs:3}  loss {loss.item():.3f}  right {right:.3f}  "
                  f"{time.monotonic() - started:.0f} s", flush=True)  # fmt: skip
        if right >= (course.goal if level == last else ENOUGH):
            if level == last:
                break
            level, right = level + 1, 0.0
    return model, right if level == last else 0.0


def ensure(name: str) -> Path:
    """The checkpoint of one of COURSES; trained first, in its own process, unless this very code has written it."""
    into = DEFAULT_DIR / name
    sources = [Path(__file__), *(Path(__file__).with_name(one) for one in ("recall_task.py", "recall_states.py"))]
    made_by = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    stamp = into / STAMP
    if not stamp.exists() or stamp.read_text() != made_by:
        subprocess.run([sys.executable, __file__, "--model", name, "--into", str(into)], check=True)
        stamp.write_text(made_by)
    return into


def write(model: Any, into: Path) -> None:
    """The checkpoint and its tokenizer, one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(into)
    tokenizer = Tokenizer(models.WordLevel(WORD_IDS, unk_token=EOS))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS).save_pretrained(into)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=COURSES, default=ATTENTION)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    assert len(WORDS) <= VOCAB_SIZE
    course, into = COURSES[options.model], options.into or DEFAULT_DIR / options.model
    model, right = train(course, options.seed)
    if right < course.goal:
        print(f"not learned within {STEPS} steps; try another --seed", file=sys.stderr)
        return 1
    write(model, into)
    print(f"{into}: {right:.3f} of the values right with {course.lengths[-1]} pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
