"""`vllm-pd trace`: ordering records of receives, showing them, and moving their bytes again without servers."""
