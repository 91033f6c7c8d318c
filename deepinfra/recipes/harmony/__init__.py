"""OpenAI's harmony format, which gpt-oss reads and writes: exact text, names checked where they stand in headers."""
