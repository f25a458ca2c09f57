"""A P/D router: `vllm-pd proxy --prefill URL --decode URL --port N`. See docs/router.md."""
