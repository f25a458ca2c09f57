"""What a model is in vLLM's terms: its facts, its weights, its attention layers' caches and its states.

Never here: a request, a block, or the engine's loop; those are beside this folder.
"""
