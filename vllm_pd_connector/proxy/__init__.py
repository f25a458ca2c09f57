"""A P/D router, `vllm-pd proxy` (extra `proxy`), and commands beside it; README.md beside this file is their manual.

The connector knows nothing of it: only `cli` imports from here, and only when one of these commands is run. It knows
of the connector what an instance says on `/metrics` (`instance_info`) and which parameters both sides expect.
"""
