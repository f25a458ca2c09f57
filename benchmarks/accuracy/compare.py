"""lm-eval against a plain instance and against P/D: both scores, the difference, and the share of identical answers.

    python benchmarks/accuracy/compare.py --plain http://host:8300 --pd http://host:8000 --model NAME --tasks gsm8k
    python benchmarks/accuracy/compare.py --recall --plain … --pd …      the recall task (recall_task.py)

lm-eval asks both over the completions API (its `local-completions`), greedily and with the same requests, so with
float32 and equal batches the answers are the same text. The score says how good the model is; the share of identical
answers says whether the cache that was handed over is the one that would have been computed. Each evaluation has a
`cache_salt` of its own, in tasks that generate (lm-eval gives others no such words): an instance that was asked the
same before, as the plain one or in a former run, has no cache of it. With --decode the run fails (1) unless as many
caches came to those instances as requests were sent, and none failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.accuracy.recall_task import END, samples
from vllm_pd_connector import instance_info

RECALL = "recall"
RECALL_PAIRS = (40, 80, 160, 240)
"""Prompts of 82 to 482 tokens."""
STATES_PAIRS = (8, 16, 32, 48)
"""Prompts of 18 to 98 tokens, for the model whose states keep them."""
RECALL_SEED = 7
"""Not the seed of any training."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One task: scores of both endpoints by metric, and how many of the answers were the same text."""

    task: str
    metric: str
    plain: float
    pd: float
    identical: float
    answers: int

    @property
    def difference(self) -> float:
        return self.pd - self.plain


def recall_config(count: int, lengths: Sequence[int] = RECALL_PAIRS) -> dict[str, Any]:
    """The recall task for lm-eval, with `count` questions over so many pairs each in turn."""

    def dataset(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        each = -(-count // len(lengths))
        drawn = [s for pairs in lengths for s in samples(RECALL_SEED + pairs, each, pairs)]
        return {"test": Dataset.from_list([{"prompt": s.prompt, "answer": s.answer} for s in drawn[:count]])}

    return {
        "task": RECALL,
        "custom_dataset": dataset,
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        # Where a tokenizer puts spaces is none of the model's business.
        "process_results": lambda doc, results: {"exact_match": float(results[0].strip() == doc["answer"])},
        "generation_kwargs": {"until": [END], "max_gen_toks": 4, "temperature": 0.0, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }


def evaluate(url: str, model: str, tasks: Sequence[Any], *, limit: int | None, at_once: int, few: int | None) -> Any:
    """lm-eval's results, with samples, of one endpoint."""
    os.environ.setdefault("HF_DATASETS_TRUST_REMOTE_CODE", "0")
    os.environ.setdefault("OPENAI_API_KEY", "EMPTY")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    arguments = {
        "model": model,
        "base_url": f"{url}/v1/completions",
        "num_concurrent": at_once,
        # A request that fails must fail the run: an answer that is asked for again hides what happened.
        "max_retries": 1,
        "tokenized_requests": False,
        "tokenizer_backend": "none",
    }
    # A task that is given whole need not be looked up in lm-eval's thousands of files.
    by_name = any(isinstance(task, str) for task in tasks)
    return simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=list(tasks),
        task_manager=TaskManager(include_defaults=by_name, metadata=arguments),
        num_fewshot=few,
        limit=limit,
        batch_size=1,
        log_samples=True,
        bootstrap_iters=0,
        gen_kwargs={"cache_salt": uuid.uuid4().hex},
    )


@dataclass(frozen=True, slots=True)
class Received:
    """How many receives ended well so far on all ranks of their instance, and how many failed on one, over some decode
    instances."""

    ended: int
    failed: int

    def lacks(self, requests: int, before: Received) -> str:
        """What is wrong if so many requests were sent since, "" if nothing is."""
        ended, failed = self.ended - before.ended, self.failed - before.failed
        if failed or ended < requests:
            return f"{ended} caches were received for {requests} requests, and {failed} receives failed"
        return ""


ENDED, FAILED = "vllm:pd_receives_total", "vllm:pd_failed_receives_total"


def received(urls: Sequence[str]) -> Received:
    """What decode instances say of it on `/metrics`.

    Raises:
        OSError: one does not answer.
        ProtocolError: what one answers is no exposition.
        RuntimeError: one has no PDConnector.
    """
    ended, failed = 0, 0
    for url in urls:
        with instance_info.opened(f"{url.rstrip('/')}/metrics", timeout=30) as answer:
            page = answer.read().decode()
        if not (engines := instance_info.parse(page)):
            raise RuntimeError(f"{url}/metrics tells of no PDConnector: is it a decode instance?")
        ranks = {engine.tp_size * engine.pp_size for engine in engines.values()}
        counts = {name: 0.0 for name in (ENDED, FAILED)}
        for one in instance_info.samples(page):
            if one.name in counts:
                counts[one.name] += one.value
        ended, failed = ended + int(counts[ENDED]) // max(ranks), failed + int(counts[FAILED])
    return Received(ended, failed)


def requests_of(result: Any) -> int:
    """How many requests lm-eval sent for this result: one for each document and filter's answers once."""
    return sum(len({sample["doc_id"] for sample in logged}) for logged in result["samples"].values())


def outcomes(plain: Any, pd: Any) -> list[Outcome]:
    """Both results, task by task and metric by metric. A group of tasks has no answers of its own."""
    found = []
    for task, metrics in plain["results"].items():
        if task not in plain["samples"]:
            continue
        pairs = list(zip(texts(plain["samples"][task]), texts(pd["samples"][task]), strict=True))
        same = sum(first == second for first, second in pairs) / len(pairs)
        for metric, value in metrics.items():
            name, _, _ = metric.partition(",")
            if isinstance(value, float) and not name.endswith("_stderr"):
                found.append(Outcome(task, metric, value, pd["results"][task][metric], same, len(pairs)))
    return found


def texts(logged: Sequence[dict[str, Any]]) -> list[str]:
    """The answers as text, in the order of the documents."""
    ordered = sorted(logged, key=lambda sample: (sample["doc_id"], sample.get("filter", "")))
    return [json.dumps(sample["resps"]) for sample in ordered]


def table(found: Sequence[Outcome]) -> str:
    lines = [f"{'task':<10} {'metric':<26} {'plain':>8} {'P/D':>8} {'difference':>11} {'identical':>10} {'answers':>8}"]
    for one in found:
        lines.append(
            f"{one.task:<10} {one.metric:<26} {one.plain:>8.3f} {one.pd:>8.3f} {one.difference:>+11.3f} "
            f"{one.identical:>10.3f} {one.answers:>8}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plain", required=True, metavar="URL", help="base URL of a plain instance")
    parser.add_argument("--pd", required=True, metavar="URL", help="base URL of the router")
    parser.add_argument(
        "--decode", nargs="+", metavar="URL", help="its decode instances, which must receive every cache"
    )
    parser.add_argument("--model", default=RECALL, help="the served model's name")
    parser.add_argument("--tasks", nargs="+", default=["gsm8k"])
    parser.add_argument("--recall", action="store_true", help="the recall task instead of --tasks")
    parser.add_argument("--limit", type=int, help="at most so many documents of each task")
    parser.add_argument("--num-fewshot", type=int)
    parser.add_argument("--at-once", type=int, default=8, help="requests in flight")
    parser.add_argument("--json", type=Path, help="write the outcomes there")
    options = parser.parse_args()
    plain_url, pd_url = options.plain.rstrip("/"), options.pd.rstrip("/")
    if plain_url == pd_url:
        parser.error(f"--plain and --pd are both {pd_url}: it would be compared with itself")
    tasks = [recall_config(options.limit or 200)] if options.recall else options.tasks

    def asked(url: str) -> Any:
        few, at_once = options.num_fewshot, options.at_once
        return evaluate(url, options.model, tasks, limit=options.limit, at_once=at_once, few=few)

    plain = asked(plain_url)
    before = received(options.decode or ())
    pd = asked(pd_url)
    wrong = received(options.decode).lacks(requests_of(pd), before) if options.decode else ""
    found = outcomes(plain, pd)
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    if wrong:
        print(f"nothing is proved: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
