"""Between vLLM and this package; only `vllm_api` imports vLLM."""
