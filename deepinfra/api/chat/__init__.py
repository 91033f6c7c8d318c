"""`/v1/chat/completions`: OpenAI's chat protocol, with DeepSeek's extras."""
