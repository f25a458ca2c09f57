"""The page of the router for operators, `/ui` on the admin port: what `vllm-pd top` shows, in a browser."""
