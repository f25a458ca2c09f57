"""The caches of published models, as vLLM lays them out on GPUs, recorded without one.

`models` is the table: which layers a model has, by the figures of its config.json. `record` gives them to vLLM's own
layers, backends, grouping and `create_kv_cache_views`, and writes down what comes out, a file per release. `read` makes
of that what a worker is handed, and of that its manifest; `verdicts` lets every pair be checked and planned, and `page`
writes docs/models.md. Nothing here needs a GPU: a layout is numbers.
"""
