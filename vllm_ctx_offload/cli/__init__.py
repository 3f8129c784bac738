"""The command `vllm-ctx-offload`."""
