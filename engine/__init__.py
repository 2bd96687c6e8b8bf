"""Outrider's engine: lossless speculative decoding over a paged KV cache.

The package map, from the top of the import order to its bottom:

- errors: what can go wrong, as one exception tree
- chat_options, infill, sampling_params: how one request wants its prompt read and its tokens chosen
- section, tree_config, drafting_config, head_config, config: the engine's settings, frozen pydantic models
- token_tree: TokenTree, the shape of every draft
- acceptance: which rule may verify which draft
- grammar: which tokens an answer of a prescribed format may go on with
- outputs, planning: what the engine says, of requests, of steps, and of what its planner goes by
- catalog: names of ready-made models, where each comes from, and its digest
- client: EngineClient, the only face of the engine the server sees
- core: bookkeeping in plain Python; scheduler, block pool, stop rules
- model: torch and transformers; loading, attention, the paged KV cache, forward passes
- sampling: pure functions of tensors; noise, logits, verification
- chat_template, tokenizer, detokenizer, output_processor: between token ids and text
- speculation: the drafters, behind one protocol
- admission, drafting, prompt_logprobs, step_rows: the parts of a step that have a life of their own
- step_recorder, step_timer, profiler: what a step did, and where its time went
- calibration, speculation_probe: what is measured and tried at start
- engine_core: EngineCore; add, abort, step
- commands, inbox, inquiry, watchdog: what goes between the event loop and the engine's thread
- async_engine: that thread around EngineCore, an EngineClient outside
- factory: builds an engine from an EngineConfig
- llm: LLM.generate for scripts, tests and benchmarks
- inspection: the target's exact law at a place, for checks
- training: trains draft heads on the target's own answers
"""
