"""What instances announce of their prefix caches (vLLM's KV-cache events), for `vllm-pd proxy --policy kv-events`.

Here is all that knows these events: their form (`wire`), what one engine holds by them (`held_blocks`), their order
and losses (`known_prefixes`), and the sockets (`subscriber`). Neither vLLM nor HTTP is known here; who gets a request
is decided in `choice`.
"""
