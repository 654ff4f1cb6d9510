"""What runs inside vLLM: the only importer of vllm and torch."""
