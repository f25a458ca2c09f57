"""`kv_transfer_params` and the bootstrap answer: what routers and proxies carry between instances.

Here: parsing, making and signing them. Never here: a request of vLLM, or a connection.
"""
