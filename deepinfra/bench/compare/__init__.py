"""Ours beside llama.cpp, vLLM and transformers: every side a process of its own, on the same weights and prompts."""
