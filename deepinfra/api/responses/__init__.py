"""`/v1/responses`: OpenAI's Responses protocol, with a store for conversations that go on by id.

What every field of the official client's request does (`request.ResponsesRequest` says so in code, a test compares):

| fields | |
| --- | --- |
| model, input, instructions, previous_response_id, max_output_tokens, temperature, top_p, tools, tool_choice, \
parallel_tool_calls, reasoning.effort, text.format, include, top_logprobs, store, stream, prompt_cache_retention, \
prompt_cache_options.ttl | honoured |
| metadata, user, safety_identifier, prompt_cache_key | repeated in the response's object |
| max_tool_calls | repeated; it counts calls of tools that run at OpenAI, and there are none |
| prompt_cache_options.mode, prompt_cache_breakpoint | accepted: every prefix is cached |
| reasoning.summary, reasoning.context (`auto`), reasoning.mode (`standard`), text.verbosity (`medium`), service_tier \
(`auto`, `default`), background (false), truncation (`disabled`), stream_options.include_obfuscation (false), image \
(`auto`, `disabled`), context_management (empty), prompt_cache_options.prewarm (false) | only what happens anyway; \
anything else is refused by name |
| access_programs, background_options, conversation, moderation, prompt | refused by name |

Beyond OpenAI's: `seed`, `stop`, `top_k`, `min_p`, penalties, `logit_bias`, `ignore_eos`, `cache_salt` as in
`/v1/chat/completions`.

Of `include`, `message.output_text.logprobs` and `reasoning.encrypted_content` add something; the other values name
parts of items that cannot occur here. `truncation: auto` is refused because it forgets silently.

Items: messages, reasoning, function calls and their outputs, and references to stored items; content is text and images
as `data:` URLs. All others are refused by name. Instructions hold for one request, as OpenAI says.
"""
