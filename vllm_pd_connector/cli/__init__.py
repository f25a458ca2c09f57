"""The command `vllm-pd`: a module per command, or per few that belong together.

What a command does stands in the package where others can use it (`geometry.explain`, `checks`, `in_tree`); here are
its words, its text and its JSON. A command moves no cache and needs neither vLLM nor a GPU. `main` is the entry point.
"""

from vllm_pd_connector.cli.app import main as main
