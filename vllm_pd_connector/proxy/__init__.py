"""A small P/D router: `python -m vllm_pd_connector.proxy --prefill URL --decode URL --port N`."""
