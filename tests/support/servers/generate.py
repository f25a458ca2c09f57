"""Answer prompts with one vLLM engine in this process, without a server; run as a program.

Standard input is a JSON object `{"flags": [...], "rounds": [[request, ...], ...]}`. A flag is one of `vllm serve`; a
request is `{"prompt": [token, ...], "max_tokens": n, "logprobs": n or null}`; the requests of a round run together.
The file that the first argument names receives rounds of answers `{"tokens": [...], "logprobs": [{token: logprob}, …],
"cached": n}`. A process of its own, because vLLM reads its environment when it is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(output: Path, job: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(job["flags"])))
    rounds = []
    for requests in job["rounds"]:
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                logprobs=request["logprobs"],
                detokenize=False,
            )
            for request in requests
        ]
        rounds.append([_answer(result) for result in llm.generate(prompts, sampling, use_tqdm=False)])
    output.write_text(json.dumps(rounds))


def _answer(result: Any) -> dict[str, Any]:
    [completion] = result.outputs
    logprobs = [{token: entry.logprob for token, entry in step.items()} for step in completion.logprobs or []]
    return {"tokens": list(completion.token_ids), "logprobs": logprobs, "cached": result.num_cached_tokens}


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.load(sys.stdin))
