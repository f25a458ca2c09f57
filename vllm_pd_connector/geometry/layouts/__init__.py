"""From a layer's page to logical tensors: one module per family of layouts.

A new layout goes here, as strides. Never here: what vLLM calls it (that is `compat`), or how it is converted.
"""
