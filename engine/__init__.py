"""Outrider's engine: lossless speculative decoding over a paged KV cache.

The package map, from the top of the import order to its bottom:

- errors: what can go wrong, as one exception tree
- config: the engine's settings, frozen pydantic models
- sampling_params: how one request wants its tokens chosen
- outputs: what the engine says, request outputs and step statistics
- client: EngineClient, the only face of the engine the server sees
- catalog: names of ready-made models, where each comes from, and its digest
- token_tree: TokenTree, the shape of every draft
- core: bookkeeping in plain Python; scheduler, block pool, stop rules
- model: torch and transformers; loading, attention, the paged KV cache, forward passes
- sampling: pure functions of tensors; noise, logits, verification
- speculation: the drafters, behind one protocol
- chat_template, tokenizer, detokenizer, output_processor: between token ids and text
- admission, drafting, prompt_logprobs, step_recorder: the parts of a step that have a life of their own
- engine_core: EngineCore; add, abort, step
- async_engine: one thread around EngineCore, an EngineClient outside
- factory: builds an engine from an EngineConfig
- llm: LLM.generate for scripts, tests and benchmarks
- training: trains draft heads on the target's own answers
"""
