"""`/v1/completions`: OpenAI's older protocol, for bare text and token ids."""
