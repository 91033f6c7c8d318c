"""The chat template of any Hugging Face model, rendered so that nothing a user typed becomes a control token."""
