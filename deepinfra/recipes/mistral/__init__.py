"""Models with Mistral's own tokenizer files: prompts by mistral-common, loaded when asked for."""
