"""vllm_pd_connector: a KV connector for vLLM's prefill/decode disaggregation.

Importing this package imports neither vLLM nor torch nor a transport library; see `plugin` for how vLLM loads it.
"""

__version__ = "0.1.0rc2.dev0"

CONNECTOR_NAME = "PDConnector"
"""As vLLM knows it, in `--kv-transfer-config`."""
